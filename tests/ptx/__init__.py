"""Executes the PTX that Triton and nvcc compile from the kernels: on the CPU, on CPU tensors, with checks.

    triton_launch.install()                 # from here on this process executes Triton's launches on the CPU
    with cuda_launch.use():                 # inside, backend "cuda" takes CPU tensors
        y = mk.kwta(x, k, backend="cuda")
    with triton_launch.capability(90): ...  # Triton compiles for sm_90
    with session.seed(3): ...               # another order of blocks and warps, other errors of .approx instructions

The following raise a `PtxError` that names the kernel, PTX line, source line, block, warp and lane:

* an access outside of the launch's tensors, even by one byte, or a misaligned access;
* an access beyond a variable in shared memory, also if it would reach the next variable (up to a distance of the larger
  of the two, and at least 1 KiB);
* a race in shared memory: between two warps with no barrier, between two lanes of a warp with no bar.warp.sync, or with
  a cp.async that may still be writing;
* an operand of a wgmma that is overwritten, or an accumulator that is written, before the wait for the wgmma;
* a missing wgmma.fence or fence.proxy.async; a bulk copy with no wait at its mbarrier; different wgmma in the warps of
  a warpgroup;
* different values stored to one address by lanes of one instruction, or by threads with no synchronization between (not
  checked in memory ranges of more than 1 GiB);
* an undefined value that is stored to global memory, or decides a branch, an address, the size of a copy, a wgmma, an
  mbarrier or a bar.red: a value from unwritten shared bytes, from an accumulator before the wait, or from global memory
  that another thread wrote with no synchronization;
* a .sync instruction whose mask contains lanes that never execute it, or lacks a lane that does;
* a barrier that some warps or lanes never reach; more instructions than `step_limit` (machine.Settings).

text.py parses PTX; decode.py, forms.py and forms_sm90.py turn it into records; executor/ (C++, built once) executes the
records; machine.py calls the executor. `python -m tests.ptx` prints the counters of an operation's kernels.
"""
