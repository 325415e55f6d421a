"""Settings of the regression set, which records times in units of PyTorch's own."""


def pytest_benchmark_scale_unit() -> tuple[str, float]:
    return "PyTorch'", 1.0  # pytest-benchmark puts its "s" behind: "time in PyTorch's"
