// ldmatrix, stmatrix and mma.sync, with the fragment layouts of the PTX ISA.
#include "numbers.h"
#include "table.h"

namespace {

// Operands: the destinations, then each lane's address of a row. Lanes 8 q to 8 q + 7 have the rows of matrix q. Of the
// record, `elements` is the number of matrices, and `flag` says that they are transposed.
Next ldmatrix(Launch& launch, Block& b, Warp& w, const Record& r, u32) {
  Next next = Next::following;
  if (!gather_all(launch, b, w, r, next)) return next;
  const u32 matrices = r.elements, used = matrices == 4 ? kAll : (1u << (8 * matrices)) - 1;
  const u32* base = lanes_of<const u32>(launch, w, r, matrices);
  check_defined(launch, b, w, r, matrices, used, "an address");
  u64 at[kLanes];
  for (u32 l = 0; l < kLanes; l++) at[l] = static_cast<u32>(base[l] + static_cast<u32>(r.immediate));
  launch.count_passes(r, used, at, 16);
  for (u32 q = 0; q < matrices; q++) {
    u16 tile[8][8];
    bool defined[8][8];
    for (u32 k = 0; k < 8; k++) {
      const u64 row = at[8 * q + k];
      bool whole;
      if (!launch.may_read_shared(b, w, r, kLanes, row, 16, whole)) return Next::leave;
      std::memcpy(tile[k], &b.shared[row], 16);
      for (u32 c = 0; c < 8; c++) defined[k][c] = b.shared_defined[row + 2 * c] && b.shared_defined[row + 2 * c + 1];
    }
    u32* to = lanes_of<u32>(launch, w, r, q);
    u64 undefined = 0;
    for (u32 l = 0; l < kLanes; l++) {
      const u32 i = l / 4, j = 2 * (l % 4);
      to[l] = r.flag ? tile[j][i] | u32(tile[j + 1][i]) << 16 : tile[i][j] | u32(tile[i][j + 1]) << 16;
      const bool low = r.flag ? defined[j][i] : defined[i][j], high = r.flag ? defined[j + 1][i] : defined[i][j + 1];
      if (!low) undefined |= u64(1) << l;
      if (!high) undefined |= u64(1) << (32 + l);
    }
    if (undefined) launch.undefined_from(r, "read of shared bytes that were never written");
    set_undefined(undefined_lanes(launch, w, r, q), undefined, kAll);
  }
  return next;
}

// Operands: each lane's address of a row, as for ldmatrix, then the sources. elements and flag as for ldmatrix.
Next stmatrix(Launch& launch, Block& b, Warp& w, const Record& r, u32) {
  Next next = Next::following;
  if (!gather_all(launch, b, w, r, next)) return next;
  const u32 matrices = r.elements, used = matrices == 4 ? kAll : (1u << (8 * matrices)) - 1;
  const u32* base = lanes_of<const u32>(launch, w, r, 0);
  check_defined(launch, b, w, r, 0, used, "an address");
  u64 at[kLanes];
  for (u32 l = 0; l < kLanes; l++) at[l] = static_cast<u32>(base[l] + static_cast<u32>(r.immediate));
  launch.count_passes(r, used, at, 16);
  for (u32 q = 0; q < matrices; q++) {
    u16 tile[8][8];
    u8 defined[8][16];
    const u32* from = lanes_of<const u32>(launch, w, r, 1 + q);
    const u64 undefined = undefined_lanes(launch, w, r, 1 + q);
    for (u32 l = 0; l < kLanes; l++) {
      for (u32 h = 0; h < 2; h++) {
        const u32 i = r.flag ? 2 * (l % 4) + h : l / 4, j = r.flag ? l / 4 : 2 * (l % 4) + h;
        tile[i][j] = static_cast<u16>(from[l] >> (16 * h));
        defined[i][2 * j] = defined[i][2 * j + 1] = !(undefined >> (l + 32 * h) & 1);
      }
    }
    for (u32 k = 0; k < 8; k++) {
      const u64 row = at[8 * q + k];
      if (!launch.may_write_shared(b, w, r, 8 * q + k, row, 16, reinterpret_cast<const u8*>(tile[k]), false))
        return Next::leave;
      std::memcpy(&b.shared[row], tile[k], 16);
      std::memcpy(&b.shared_defined[row], defined[k], 16);
    }
  }
  return next;
}

// D = A B + C with A (16, K) in 4 registers, B (K, 8) in 2, C and D (16, 8) in 4; K is `depth`. An undefined element of
// A makes its row of D undefined, one of B its column.
struct Bf16 {
  static constexpr u32 depth = 16;
  static f32 value(u32 bits, u32 half) { return from_bf16(static_cast<u16>(half ? bits >> 16 : bits)); }
};
struct F16 {
  static constexpr u32 depth = 16;
  static f32 value(u32 bits, u32 half) { return from_f16(static_cast<u16>(half ? bits >> 16 : bits)); }
};
struct Tf32 {  // the lower 13 bits are ignored
  static constexpr u32 depth = 8;
  static f32 value(u32 word, u32) { return bits<f32>(word & 0xffffe000u); }
};

template <class Kind>
Next mma(Launch& launch, Block& b, Warp& w, const Record& r, u32) {
  Next next = Next::following;
  if (!gather_all(launch, b, w, r, next)) return next;
  constexpr u32 halves = Kind::depth / 8;
  f32 a[16][Kind::depth], bt[Kind::depth][8], c[16][8];
  u32 bad_rows = 0, bad_columns = 0;
  for (u32 q = 0; q < 4; q++) {
    const u32* from = lanes_of<const u32>(launch, w, r, 4 + q);
    const u64 undefined = undefined_lanes(launch, w, r, 4 + q);
    for (u32 l = 0; l < kLanes; l++) {
      const u32 row = l / 4 + 8 * (q & 1), column = halves * (l % 4) + 4 * halves * (q >> 1);
      for (u32 h = 0; h < halves; h++) a[row][column + h] = Kind::value(from[l], h);
      if (undefined && (either(undefined) >> l & 1)) bad_rows |= 1u << row;
    }
  }
  for (u32 q = 0; q < 2; q++) {
    const u32* from = lanes_of<const u32>(launch, w, r, 8 + q);
    const u64 undefined = undefined_lanes(launch, w, r, 8 + q);
    for (u32 l = 0; l < kLanes; l++) {
      const u32 row = halves * (l % 4) + 4 * halves * q, column = l / 4;
      for (u32 h = 0; h < halves; h++) bt[row + h][column] = Kind::value(from[l], h);
      if (undefined && (either(undefined) >> l & 1)) bad_columns |= 1u << column;
    }
  }
  u64 undefined_sum[4];
  for (u32 q = 0; q < 4; q++) {
    const f32* from = lanes_of<const f32>(launch, w, r, 10 + q);
    undefined_sum[q] = undefined_lanes(launch, w, r, 10 + q);
    for (u32 l = 0; l < kLanes; l++) c[l / 4 + 8 * (q >> 1)][2 * (l % 4) + (q & 1)] = from[l];
  }
  for (u32 i = 0; i < 16; i++) {
    for (u32 k = 0; k < Kind::depth; k++) {
      for (u32 n = 0; n < 8; n++) c[i][n] += a[i][k] * bt[k][n];
    }
  }
  for (u32 q = 0; q < 4; q++) {
    f32* to = lanes_of<f32>(launch, w, r, q);
    u64 undefined = undefined_sum[q];
    for (u32 l = 0; l < kLanes; l++) {
      const u32 row = l / 4 + 8 * (q >> 1), column = 2 * (l % 4) + (q & 1);
      to[l] = c[row][column];
      if ((bad_rows >> row | bad_columns >> column) & 1) undefined |= both(1u << l);
    }
    set_undefined(undefined_lanes(launch, w, r, q), undefined, kAll);
  }
  return next;
}

}  // namespace

void add_tensor(Table& t) {
  t.add("ldmatrix", ldmatrix);
  t.add("stmatrix", stmatrix);
  t.add("mma.m16n8k16.bf16", mma<Bf16>);
  t.add("mma.m16n8k16.f16", mma<F16>);
  t.add("mma.m16n8k8.tf32", mma<Tf32>);
}
