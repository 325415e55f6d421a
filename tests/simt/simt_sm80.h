// Host forms of what came with sm_80 and before: cp.async, ldmatrix, mma.sync. Included by simt.h.
#pragma once

namespace simt {

// What one cp.async will have written once it lands. `late` copies land at the wait that covers them.
struct AsyncCopy {
  void* destination;
  int bytes;
  bool late;
  unsigned char data[16];
};

bool async_coin();
void async_push(const AsyncCopy& copy);
void async_commit(Where where = Where::here());
// The next copy that has to land for at most `pending` groups to remain; false when there is none.
bool async_next(int pending, AsyncCopy& copy);

inline bool aligned(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// A copy lands at its issue, which shows a destination that somebody still reads, or at its wait, which shows a read
// that comes too early: until then the destination holds 0xFF.
template <int BYTES>
void async_copy(void* destination, const void* source, int valid, Where where = Where::here()) {
  if (valid < 0 || valid > BYTES) fail("cp.async of " + std::to_string(valid) + " valid bytes", where);
  if (!aligned(destination, BYTES) || !aligned(source, BYTES)) fail("cp.async on a misaligned address", where);
  if (!is_shared(destination, BYTES)) fail("cp.async to what is not shared memory", where);
  if (valid && is_shared(source, valid)) fail("cp.async from shared memory", where);
  AsyncCopy copy{destination, BYTES, async_coin(), {}};
  for (int i = 0; i < valid; i++) copy.data[i] = static_cast<const unsigned char*>(source)[i];
  for (int i = 0; i < BYTES; i++) static_cast<unsigned char*>(destination)[i] = copy.late ? 0xff : copy.data[i];
  async_push(copy);
}

inline void async_wait(int pending) {
  AsyncCopy copy;
  while (async_next(pending, copy)) {
    if (!copy.late) continue;
    for (int i = 0; i < copy.bytes; i++) static_cast<unsigned char*>(copy.destination)[i] = copy.data[i];
  }
}

// A lane reads the row it names itself and brings it along, so that the race detector sees who read what.
template <int COUNT, bool TRANSPOSED>
void load_matrix(uint32_t (&fragment)[COUNT], const void* row, Where where = Where::here()) {
  struct Lane {
    uint16_t row[8];
    uint32_t fragment[COUNT];
  } lane{};
  if (current_lane() < 8 * COUNT) {
    if (!aligned(row, 16)) fail("ldmatrix row at a misaligned address", where);
    if (!is_shared(row, 16)) fail("ldmatrix row outside shared memory", where);
    std::memcpy(lane.row, row, sizeof lane.row);
  }
  meet("ldmatrix", 0xffffffffu, lane, [](Lanes<Lane> lanes) {
    lanes.each([&](int i, Lane& to) {
      for (int m = 0; m < COUNT; m++) {
        uint32_t halves[2];
        for (int h = 0; h < 2; h++) {
          const int r = i / 4, c = i % 4 * 2 + h;
          halves[h] = TRANSPOSED ? lanes[8 * m + c].row[r] : lanes[8 * m + r].row[c];
        }
        to.fragment[m] = halves[0] | halves[1] << 16;
      }
    });
  }, where);
  std::memcpy(fragment, lane.fragment, sizeof fragment);
}

float float_of_half(uint16_t bits);

template <bool BF16>
float float_of_16(uint32_t word, int half) {
  const uint16_t element = static_cast<uint16_t>(word >> 16 * half);
  if constexpr (BF16) return bits<float>(uint32_t(element) << 16);
  return float_of_half(element);
}

// Products are added in the order of k, in fp32; a GPU may add in another order and with fewer bits.
template <bool BF16>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Where where = Where::here()) {
  struct Lane {
    float c[4];
    uint32_t a[4], b[2];
  } lane;
  std::memcpy(lane.c, c, sizeof c);
  std::memcpy(lane.a, a, sizeof a);
  std::memcpy(lane.b, b, sizeof b);
  meet("mma.sync", 0xffffffffu, lane, [](Lanes<Lane> lanes) {
    float left[16][16], right[8][16];
    lanes.each([&](int i, Lane& from) {
      const int group = i / 4, pair = i % 4;
      for (int e = 0; e < 8; e++) {
        left[group + 8 * (e / 2 % 2)][2 * pair + e % 2 + 8 * (e / 4)] = float_of_16<BF16>(from.a[e / 2], e % 2);
      }
      for (int e = 0; e < 4; e++) {
        right[group][2 * pair + e % 2 + 8 * (e / 2)] = float_of_16<BF16>(from.b[e / 2], e % 2);
      }
    });
    lanes.each([&](int i, Lane& to) {
      for (int e = 0; e < 4; e++) {
        const int row = i / 4 + 8 * (e / 2), column = i % 4 * 2 + e % 2;
        for (int k = 0; k < 16; k++) to.c[e] += left[row][k] * right[column][k];
      }
    });
  }, where);
  std::memcpy(c, lane.c, sizeof c);
}

}  // namespace simt
