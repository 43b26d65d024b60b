"""Profiling rows of GPUs before Hopper, from a dcgm-exporter that runs on the node.

Before Hopper one process of a machine owns the profiling counters. Where that is DCGM's, its
exporter tells them to everybody; only lines that carry a GPU's uuid are used.
Reference: dcgm-exporter's README, and dcgm_fields.h for the fields.
"""

from __future__ import annotations

import http.client
import logging
import math
import re
import threading
import time
import urllib.request
from typing import TYPE_CHECKING

from sidecar.sources.errors import MalformedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sidecar.sources.gpu import Gpu

LOG = logging.getLogger("kitty.dcgm")

PERIOD = 5.0
"""Seconds between two requests; the exporter itself reads every 30 s unless told otherwise."""
TIMEOUT = 2.0
LIMIT = 8 << 20
"""Bytes of an answer that are read."""

FIELDS = {
    "DCGM_FI_PROF_SM_ACTIVE": "gpu_sm_active",
    "DCGM_FI_PROF_SM_OCCUPANCY": "gpu_sm_occupancy",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "gpu_tensor_core_active",
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": "gpu_fp32_pipe_active",
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": "gpu_fp16_pipe_active",
    "DCGM_FI_PROF_DRAM_ACTIVE": "gpu_dram_active",
    "DCGM_FI_PROF_NVLINK_TX_BYTES": "gpu_nvlink_tx_bytes",
    "DCGM_FI_PROF_NVLINK_RX_BYTES": "gpu_nvlink_rx_bytes",
}
"""Ratios of 0 to 1, and bytes a second, as our own rows are."""

_LINE = re.compile(rb"^(DCGM_FI_PROF_\w+)\{(.*)\}\s+(\S+)")
_LABEL = re.compile(rb'(\w+)="([^"\\]*)"')

Rows = dict[tuple[str, str], dict[str, float]]
"""Values by family name, by uuid of the whole GPU and GPU instance id (empty without MIG)."""


def parse(page: bytes) -> Rows:
    """Picks the profiling fields out of a page.

    Sample: `DCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-5a..",GPU_I_ID="7",Hostname="n1"} 0.97`.
    Other lines are ignored.

    Raises:
        MalformedError: a line of these holds no number.
    """
    rows: Rows = {}
    for line in page.splitlines():
        match = _LINE.match(line)
        name = FIELDS.get(match[1].decode()) if match else None
        if match is None or name is None:
            continue
        labels = dict(_LABEL.findall(match[2]))
        uuid = labels.get(b"UUID") or labels.get(b"uuid")
        if not uuid:
            continue
        try:
            value = float(match[3])
        except ValueError as e:
            raise MalformedError(f"dcgm-exporter: {line[:80]!r}") from e
        if math.isfinite(value) and value >= 0:
            key = (uuid.decode("utf-8", "replace"), labels.get(b"GPU_I_ID", b"").decode())
            rows.setdefault(key, {})[name] = value
    return rows


class DcgmExporter:
    """Asks the exporter in a thread of its own.

    Args:
        url: of its metrics, http only: it is on the node.
        clock: monotonic seconds.
    """

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._clock = clock
        self._latest: tuple[float, Rows] = (0.0, {})
        self._failed = False
        # A proxy of the environment is for the world outside, not for the node.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._run, name="dcgm-exporter", daemon=True).start()

    def rows(self, gpu: Gpu) -> Mapping[str, float]:
        """Returns the GPU's profiling rows, empty where the exporter has none or is silent."""
        taken, rows = self._latest
        if self._clock() - taken > 2 * PERIOD + TIMEOUT:
            return {}
        piece = gpu.instance
        key = (piece.parent, str(piece.gpu_instance)) if piece else (gpu.uuid, "")
        return rows.get(key, {})

    def refresh(self) -> None:
        """Asks once; a failure is logged when it is new."""
        try:
            with self._opener.open(self._url, timeout=TIMEOUT) as answer:
                rows = parse(answer.read(LIMIT))
        except (OSError, ValueError, http.client.HTTPException, MalformedError) as e:
            if not self._failed:
                LOG.warning("%s: %s", self._url, e)
            self._failed = True
            return
        self._failed = False
        self._latest = (self._clock(), rows)

    def _run(self) -> None:
        while True:
            self.refresh()
            time.sleep(PERIOD)
