// State of asynchronous operations: copies, and for sm_90 products of warpgroups (wgmma) and mbarriers.
#pragma once

#include <deque>
#include <vector>

#include "types.h"

// A copy of up to 16 bytes into shared memory, which is written when a wait completes the copy.
struct Copy {
  u32 to;
  u8 size, lane;
  u8 bytes[16];
};

// The accumulators of wgmma that no wait has completed. Until the wait their registers hold kPoison and are undefined.
struct Product {
  const u32* registers;         // offsets of the accumulators, from the record's operands
  u32 count;
  u64 group;                    // number of the group with the last wgmma on these accumulators
  std::vector<f32> sums;        // (16, 2 * count): the values to store at the wait
  std::vector<u64> undefined;   // by register: undefined lanes after the product
};
constexpr u32 kPoison = 0x7fedcba9;

struct Products {
  std::vector<Product> running;
  std::vector<u32> reads;                     // addresses of the 16-byte pieces that wgmma read since the last commit
  std::deque<std::vector<u32>> groups;        // the same for each group that may still run, the oldest first
  u64 committed = 0;                          // number of groups committed so far
};

// The wgmma that a warpgroup issued. Its four warps must issue the same wgmma in the same order.
struct Agreement {
  struct Call {
    u32 pc, scale;
    u64 a, b;  // descriptors
    u32 warp;  // the first warp that issued it
  };
  std::deque<Call> calls;         // wgmma that not all four warps have issued yet
  u64 first = 0, issued[4] = {};  // first: number of calls[0]; issued: number of wgmma that each warp has issued
};

// A barrier in shared memory. A phase is complete after all its arrivals and all its bytes.
struct Mbarrier {
  u32 slot = 0;                   // index of its entry in Warp::clocks
  u32 expected = 0, pending = 0;  // arrivals of a phase; those that are still missing
  u64 phase = 0, bytes = 0;       // number of the phase; bytes that it waits for
  bool live = false;
  std::vector<Copy> copies;
  u64 copied = 0;                 // bytes of `copies`
  u32 clock = 0;                  // of the last complete phase
  std::vector<u32> clocks, fenced;  // maxima of Warp::clocks and Warp::fenced of the warps that arrived
};

constexpr u32 kMbarriers = 16;  // limit of mbarriers in a block
