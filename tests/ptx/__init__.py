"""Executes on CPU tensors, with checks, the PTX that Triton and nvcc compile from the kernels.

    triton_launch.install()                 # from here on this process runs Triton's launches on the executor
    with cuda_launch.use():                 # inside, backend "cuda" takes CPU tensors
        y = mk.kwta(x, k, backend="cuda")
    with triton_launch.capability(90): ...  # Triton compiles for sm_90
    with session.seed(3): ...               # another order of blocks and warps, errors of .approx instructions

An error of a launch raises a `PtxError` with kernel, PTX line, source line, block, warp and lane:

* an access by even one byte outside of the launch's tensors, or a misaligned one;
* shared memory that two warps access with no barrier between them, or that a cp.async may still write;
* operands of a wgmma overwritten, or its accumulators touched, before a wait; a missing wgmma.fence or
  fence.proxy.async; a bulk copy without a wait at its mbarrier; warps of a warpgroup that disagree;
* different values stored to one address by lanes of one instruction, or by warps with no barrier between them;
* an uninitialized or unordered value that is stored to global memory or decides a branch or an address;
* a .sync instruction whose mask differs from the set of lanes that execute it;
* a barrier that some warps never reach; more instructions than the step limit.

text.py parses PTX; decode.py, forms.py and forms_sm90.py turn it into records; executor/ (C++, built once) runs them;
machine.py calls it. `python -m ptx` prints the counters of a kernel.
"""
