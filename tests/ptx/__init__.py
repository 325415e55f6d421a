"""Executes the PTX that Triton and nvcc compile from the kernels: on the CPU, on CPU tensors, with checks.

    triton_launch.install()                 # from here on this process runs Triton's launches on the executor
    with cuda_launch.use():                 # inside, backend "cuda" takes CPU tensors
        y = mk.kwta(x, k, backend="cuda")
    with triton_launch.capability(90): ...  # Triton compiles for sm_90
    with session.seed(3): ...               # another order of blocks and warps, other errors of .approx instructions

These raise a `PtxError` with kernel, PTX line, source line, block, warp and lane:

* an access to even one byte outside of the launch's tensors, or a misaligned one;
* a race in shared memory: between two warps with no barrier, between two lanes of a warp with no bar.warp.sync, or with
  a cp.async that may still be writing;
* operands of a wgmma that are overwritten, or accumulators that are accessed, before its wait; a missing wgmma.fence or
  fence.proxy.async; a bulk copy without a wait at its mbarrier; warps of a warpgroup that issue different wgmma;
* different values stored to one address by lanes of one instruction, or by threads with no synchronization;
* an undefined value (from shared bytes never written, or from global memory that another thread wrote with no
  synchronization) that is stored to global memory, or decides a branch or an address;
* a .sync instruction whose mask contains lanes that never execute it, or lacks a lane that does;
* a barrier that some warps never reach; more instructions than `step_limit` (machine.Settings).

text.py parses PTX; decode.py, forms.py and forms_sm90.py turn it into records; executor/ (C++, built once) runs them;
machine.py calls it. `python -m ptx` prints the counters of a kernel.
"""
