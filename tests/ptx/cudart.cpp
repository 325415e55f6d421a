// Replaces libcudart for host code that nvcc compiled. A launch with valid sizes calls `callback`.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>

struct Dim3 {
  unsigned x, y, z;
};
using Callback = int (*)(const char* name, const unsigned* grid, const unsigned* block, void** arguments,
                         size_t shared);

namespace {

constexpr int kInvalidValue = 1, kAttributeSharedOptin = 97, kAttributeMultiprocessors = 16, kAttributeMajor = 75,
              kAttributeMinor = 76, kDefaultShared = 48 * 1024;

struct Device {
  int shared = 163 * 1024, multiprocessors = 108, major = 8, minor = 0;
} device;

std::map<const void*, std::string>& names() {  // name of a kernel, by the host function that launches it
  static std::map<const void*, std::string> table;
  return table;
}
std::map<const void*, size_t>& allowed() {  // by the same host function: most bytes of dynamic shared memory
  static std::map<const void*, size_t> table;
  return table;
}

Callback callback;
Dim3 pushed_grid, pushed_block;
size_t pushed_shared;
void* pushed_stream;
int last_error;

}  // namespace

extern "C" {

void ptx_callback(Callback given) { callback = given; }
void ptx_device(int shared, int multiprocessors, int major, int minor) {
  device = {shared, multiprocessors, major, minor};
  allowed().clear();
}

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  names()[host] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void* stream) {
  pushed_grid = grid, pushed_block = block, pushed_shared = shared, pushed_stream = stream;
  return 0;
}
int __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void* stream) {
  *grid = pushed_grid, *block = pushed_block, *shared = pushed_shared;
  std::memcpy(stream, &pushed_stream, sizeof pushed_stream);
  return 0;
}
int __cudaGetKernel(void** kernel, const void* host) {
  *kernel = const_cast<void*>(host);
  return 0;
}
int cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void** arguments, size_t shared, void*) {
  const unsigned threads = block.x * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || !threads || threads > 1024) {
    return last_error = 9;  // cudaErrorInvalidConfiguration
  }
  const auto found = allowed().find(kernel);
  if (shared > (found == allowed().end() ? kDefaultShared : found->second)) return last_error = kInvalidValue;
  const unsigned grids[] = {grid.x, grid.y, grid.z}, blocks[] = {block.x, block.y, block.z};
  return last_error = callback(names()[kernel].c_str(), grids, blocks, arguments, shared);
}
int __cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void** arguments, size_t shared, void* stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
int cudaGetLastError() {
  const int error = last_error;
  last_error = 0;
  return error;
}
const char* cudaGetErrorString(int) { return "an error of tests/ptx/cudart.cpp"; }
int cudaFuncSetAttribute(const void* kernel, int attribute, int value) {
  if (attribute != 8) return last_error = kInvalidValue;  // cudaFuncAttributeMaxDynamicSharedMemorySize
  if (value > device.shared) return last_error = kInvalidValue;
  allowed()[kernel] = static_cast<size_t>(value);
  return 0;
}
int cudaGetDevice(int* number) {
  *number = 0;
  return 0;
}
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case kAttributeSharedOptin: *value = device.shared; break;
    case kAttributeMultiprocessors: *value = device.multiprocessors; break;
    case kAttributeMajor: *value = device.major; break;
    case kAttributeMinor: *value = device.minor; break;
    default: return last_error = kInvalidValue;
  }
  return 0;
}
}
