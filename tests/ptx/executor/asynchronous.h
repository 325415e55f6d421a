// State of asynchronous operations: copies, and for sm_90 products of warpgroups (wgmma) and mbarriers.
#pragma once

#include <deque>
#include <vector>

#include "types.h"

// Up to 16 bytes on their way into shared memory: already read, and written when the copy completes.
struct Copy {
  u32 to;
  u8 size, lane;
  u8 bytes[16];
};

// The accumulators of one or several wgmma that no wait has completed yet. Until the wait their registers hold kPoison
// and count as undefined.
struct Product {
  const u32* registers;         // offset of each accumulator among the warp's registers
  u32 count;
  u64 group;                    // number of the group with the last wgmma on these accumulators
  std::vector<f32> sums;        // (16, 2 * count): the values to store at the wait
  std::vector<u64> undefined;   // by register: the lanes that are undefined after the wait
};
constexpr u32 kPoison = 0x7fedcba9;

struct Products {
  std::vector<Product> running;
  std::vector<u32> reads;                     // addresses of the 16-byte pieces that wgmma read since the last commit
  std::deque<std::vector<u32>> groups;        // these addresses for each group that may still run, the oldest first
  u64 committed = 0;                          // number of groups committed so far
};

// For the check that the four warps of a warpgroup issue the same wgmma in the same order.
struct Agreement {
  struct Call {
    u32 pc, scale;  // scale: 1 to add to the accumulators, 0 to overwrite them
    u64 a, b;  // descriptors
    u32 warp;  // the first warp that issued it
  };
  std::deque<Call> calls;         // wgmma that not all four warps have issued yet
  u64 first = 0, issued[4] = {};  // issued: wgmma of each warp so far; first: wgmma that were removed from `calls`
};

// A barrier in shared memory. A phase waits for a number of arrivals and of copied bytes.
struct Mbarrier {
  u32 slot = 0;                   // index of its entry in Warp::clocks
  u32 expected = 0, pending = 0;  // arrivals of a phase; arrivals that are still missing
  u64 phase = 0, bytes = 0;       // number of the phase; bytes that the phase waits for
  bool live = false;
  std::vector<Copy> copies;
  u64 copied = 0;                 // bytes of `copies`
  u32 clock = 0;                  // rises when a phase completes
  std::vector<u32> clocks, fenced;  // maxima of Warp::clocks and Warp::fenced over the warps that arrived
};

constexpr u32 kMbarriers = 16;  // most mbarriers in a block
