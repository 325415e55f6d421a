"""A stand-in for a GPU, for dry runs of `python -m bench gpu` without one:
`python -m tests.helpers.standin.run gpu --quick`.

What is asked for on "cuda" is put on the CPU, C++ kernels stand in for those of Triton and CUDA, and torch.cuda's
events, graphs and memory, and NVML, are faked. So all of the bench runs, in its processes; its figures mean nothing.

STANDIN_FAULTS plants faults, such as "kwta_fwd triton wrong, sinkhorn_fwd cuda hang": function, backend and a kind
in `kernels.FAULTS`, which all act in bfloat16 alone.
"""
