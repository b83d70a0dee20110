"""Claims a free GPU, then becomes the service: `python -m common.runtime.gpu_claim services.decode [flags]`.

Replicas of one pool are equal, so nobody can write down which GPU each has. Every process of a host takes the first
`gpu-N.lock` in the shared folder that nobody holds. The lock belongs to the open file: it lasts as long as the
process, over `exec`, and ends with it however it dies. The service is told by `PENSTOCK_DEVICE=cuda:N`. (The name has no
`penstock-` in front: whatever has that, and no lock, is a dead worker's segment and gets swept.)

`--if VARIABLE` in front of the service: without a value of that variable it needs no GPU, and takes none
(`--if PENSTOCK_DRAFT_MODEL services.draft`: n-grams are counted on a CPU).
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
from pathlib import Path

from common.protocol.errors import ConfigError


def count_gpus(devices: Path = Path("/dev")) -> int:
    """GPUs whose device node (`nvidia0`, `nvidia1`, …) is here; no driver library is loaded for it."""
    return sum(1 for node in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name))


def claim(directory: Path, num_gpus: int) -> tuple[int, int]:
    """Take the first free GPU of `num_gpus`: its index, and the file descriptor that holds the lock.

    The descriptor is inheritable, so that the lock outlives `exec`.

    :raises ConfigError: if there is none, all are taken, or a lock can't be opened.
    """
    if num_gpus == 0:
        raise ConfigError("no GPU is visible here: install the NVIDIA container toolkit, or start without compose.gpu.yaml")
    directory.mkdir(parents=True, exist_ok=True)
    for index in range(num_gpus):
        lock = directory / f"gpu-{index}.lock"
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"{lock} can't be opened ({error.strerror}): another user's, or a link; remove it") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        os.set_inheritable(descriptor, True)
        return index, descriptor
    raise ConfigError(f"all {num_gpus} GPUs are claimed: scale prefill, decode and draft models to {num_gpus} replicas in all")


def main() -> None:
    """Claim, then replace this process with the service that the arguments name."""
    command, is_needed = sys.argv[1:], True
    if command[:1] == ["--if"]:
        is_needed = bool(os.environ.get("".join(command[1:2])))
        command = command[2:]
    if not command:
        sys.exit("usage: python -m common.runtime.gpu_claim [--if VARIABLE] services.NAME [flags]")
    if is_needed:
        try:
            index, _ = claim(Path(os.environ.get("PENSTOCK_SHM_DIR", "/dev/shm")), count_gpus())
        except ConfigError as error:
            sys.exit(f"error: {error}")
        os.environ["PENSTOCK_DEVICE"] = f"cuda:{index}"
    os.execv(sys.executable, [sys.executable, "-m", *command])


if __name__ == "__main__":
    main()
