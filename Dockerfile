# One image for all five services and the `penstock` command; compose.yaml says which one a container runs.
#   docker build -t penstock .
#   docker build -t penstock --build-arg TORCH_INDEX=https://pypi.org/simple .      torch with CUDA
FROM python:3.11-slim-bookworm

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# The model that is put into the image, so that containers start without a network. Empty: none.
ARG IMAGE_MODEL=smollm2-135m-instruct

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PENSTOCK_HOME=/var/lib/penstock

RUN useradd --uid 10001 --user-group --home-dir /var/lib/penstock --create-home penstock

WORKDIR /opt/penstock
# The largest layer first: it changes only with the version of torch. pip does nothing where the base image has it.
COPY constraints.txt ./
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" -r constraints.txt

# Triton, which comes with torch for CUDA, builds the launchers of its kernels with a C compiler.
RUN if python -c "import sys, torch; sys.exit(torch.version.cuda is None)"; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
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
RUN if [ -n "$IMAGE_MODEL" ]; then penstock pull "$IMAGE_MODEL"; fi

ENTRYPOINT ["python", "-m"]
CMD ["services.gateway"]
