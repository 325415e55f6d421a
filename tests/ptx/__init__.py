"""Compiled PTX on the CPU: what Triton and nvcc made of the kernels runs on CPU tensors, with checks.

    triton_launch.install()                 # from here on Triton's launches of this process run here
    with cuda_launch.use():                 # backend "cuda" takes CPU tensors inside
        y = mk.kwta(x, k, backend="cuda")
    with triton_launch.capability(90): ...  # Triton compiles for sm_90
    with session.seed(3): ...               # another order of blocks and warps, errors of .approx instructions

An error of a launch is a `PtxError` that names kernel, PTX line, source line, block, warp and lane:

* an access outside of the launch's tensors, to the byte, or misaligned;
* shared memory that two warps access with no barrier between, or that a cp.async may still be writing;
* operands of a wgmma overwritten, or its accumulators touched, before a wait; a missing wgmma.fence or
  fence.proxy.async; a bulk copy without a wait at its mbarrier; warps of a warpgroup that disagree;
* different values stored to one address by lanes of one instruction, or by warps that nothing orders;
* a value that nobody wrote, or that is left to chance, where it is stored or decides something;
* lanes that a .sync instruction names and that never come, or that come and are not named;
* a barrier that some warps never reach, and more instructions than the step limit.

text.py reads PTX, decode.py, forms.py and forms_sm90.py make records of it, executor/ runs them (C++, built once),
machine.py is the bridge. `python -m ptx` prints the counters of a kernel.
"""
