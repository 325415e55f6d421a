// What every other header starts from: the CUDA language itself, or its twin on the host (tests/simt).
#pragma once

#include <cstdint>

#ifdef SIMT_HOST
#include "simt.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif
