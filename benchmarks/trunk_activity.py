"""Mean SM activity by NVML's GPM: an observation, never a measure of work done (one MPS arm was published at
0.98 with less work done than a shared trunk at 0.89)."""

from __future__ import annotations

from typing import Any


class SmActivity:
    """`activity(True)` begins an interval, `activity(False)` ends it; `mean` is over all of them, 0 … 1.

    None where there is no GPU or more than one (whose is it?), or no GPM (before Hopper, no permission).
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._begun: Any = None
        self._values: list[float] = []
        try:
            import pynvml as nvml

            nvml.nvmlInit()
            self._device = nvml.nvmlDeviceGetHandleByIndex(0)
            alone = nvml.nvmlDeviceGetCount() == 1
            if alone and nvml.nvmlGpmQueryDeviceSupport(self._device).isSupportedDevice:
                self._nvml = nvml
        except Exception:  # no module, no driver, no such call
            self._nvml = None

    @property
    def mean(self) -> float | None:
        return sum(self._values) / len(self._values) if self._values else None

    def __call__(self, begin: bool) -> None:
        if self._nvml is None:
            return
        try:
            sample = self._nvml.nvmlGpmSampleGet(self._device, self._nvml.nvmlGpmSampleAlloc())
            if not begin:
                self._values.append(self._between(self._begun, sample))
                self._nvml.nvmlGpmSampleFree(self._begun)
                self._nvml.nvmlGpmSampleFree(sample)
            self._begun = sample if begin else None
        except Exception:  # as above: no arm ends for an observation
            self._nvml = None

    def _between(self, first: Any, second: Any) -> float:
        asked = self._nvml.c_nvmlGpmMetricsGet_t()
        asked.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics, asked.sample1, asked.sample2 = 1, first, second
        asked.metrics[0].metricId = self._nvml.NVML_GPM_METRIC_SM_UTIL
        return float(self._nvml.nvmlGpmMetricsGet(asked).metrics[0].value) / 100.0
