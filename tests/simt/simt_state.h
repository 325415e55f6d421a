// State of threads, barriers, warp collectives and shared memory. Included by simt.cpp alone.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "fiber.h"
#include "simt.h"

namespace simt {

constexpr int kWarp = 32;
constexpr int kBarriers = 16;

enum class State { ready, at_barrier, at_meeting, done };

struct PendingCopy {
  AsyncCopy copy;
  int64_t group;
};

struct Thread {
  Fiber fiber;
  State state;
  uint3 index;
  Where where;       // of the rendezvous it waits at
  const char* what;  // its name
  std::deque<PendingCopy> copies;
  int64_t groups;  // committed so far
};

struct Barrier {
  int expected = 0, arrived = 0, votes = 0, last_votes = 0;
  Where where{};
  std::vector<int> waiting;
};

struct Meeting {
  uint32_t mask = 0, arrived = 0;
  const char* name = nullptr;
  Where where{};
  void* lanes[kWarp];
};

struct SharedVariable {
  const void* key;
  std::unique_ptr<void, void (*)(void*)> memory;
  size_t bytes;
};

inline std::string place(Where where) {
  const char* name = std::strrchr(where.file, '/');
  return std::string(name ? name + 1 : where.file) + ":" + std::to_string(where.line);
}

inline std::string triple(uint3 i) {
  return "(" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
}

}  // namespace simt
