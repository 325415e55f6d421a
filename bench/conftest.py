"""Settings of the regression set, whose unit of time is PyTorch's own time for the same call."""


def pytest_benchmark_scale_unit() -> tuple[str, float]:
    return "PyTorch'", 1.0  # pytest-benchmark appends "s": "time in PyTorch's"
