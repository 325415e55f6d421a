"""pytest-benchmark settings: times are multiples of PyTorch's time for the same call."""


def pytest_benchmark_scale_unit() -> tuple[str, float]:
    return "PyTorch'", 1.0  # the header is "time in " + unit + "s"
