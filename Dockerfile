# One image for all five services and the `penstock` command; compose.yaml says which one a container runs.
#   docker build -t penstock .
#   docker build -t penstock --build-arg TORCH_INDEX=https://pypi.org/simple .      torch with CUDA
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# The models that are put into the image, by spaces apart: containers look for theirs there, or in a folder that is mounted, and fetch
# none. Empty: none.
ARG IMAGE_MODEL=smollm2-135m-instruct

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PENSTOCK_HOME=/var/lib/penstock

RUN useradd --uid 10001 --user-group --home-dir /var/lib/penstock --create-home penstock \
    && install -d -o penstock -g penstock /var/cache/penstock \
    && install -d -o penstock -g penstock -m 700 /var/lib/penstock-kv \
    && for user in nats gateway prefill decode draft kvstore client monitor; do \
        install -d -o penstock -g penstock -m 700 "/run/penstock-access/$user"; done

WORKDIR /opt/penstock
# The largest layer first: it changes only with the version of torch. pip does nothing where the base image has it.
# Of torch for CUDA, what nothing here loads goes in the same layer: static libraries and headers, profilers, and libraries
# of CUDA that neither torch nor Triton names (found with grep over all of them).
COPY constraints.txt ./
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" -r constraints.txt \
    && cd "$(python -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')" \
    && if [ -d nvidia ]; then \
        find nvidia triton -name '*.a' -delete \
        && rm -rf torch/include nvidia/*/include nvidia/nvshmem/lib/libnvshmem_device.bc \
            triton/_C/libproton.so triton/instrumentation triton/FileCheck \
            nvidia/cu*/lib/libcusolverMg.so* nvidia/cu*/lib/libnvrtc*.alt.so* nvidia/cu*/lib/libnvperf_*.so; \
    fi

# Triton, which comes with torch for CUDA, builds the launchers of its kernels with a C compiler.
RUN if python -c "import sys, torch; sys.exit(torch.version.cuda is None)"; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
        && apt-get clean && rm -rf /var/lib/apt/lists/*; \
    fi

# The dependencies next, without the code, so that a change of the code builds in seconds.
COPY pyproject.toml README.md LICENSE ./
RUN mkdir common services \
    && pip install --no-cache-dir -c constraints.txt . \
    && pip uninstall --yes --quiet penstock

COPY common ./common
COPY services ./services
RUN pip install --no-cache-dir --no-deps --editable . && python -m compileall -q common services

USER penstock
RUN for model in $IMAGE_MODEL; do penstock pull "$model" || exit 1; done

ENTRYPOINT ["python", "-m"]
CMD ["services.gateway"]
