#include "kernels/cpu/products/bfloat16_products.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <vector>

namespace headwater::cpu {
namespace {

// c [m, n] = alpha a . b + beta c with fp32 c; row-major; 'N' or 'T' for each operand. Returns 0, or why not.
using Gemm = int (*)(char transposed_a, char transposed_b, int64_t m, int64_t n, int64_t k, float alpha, const uint16_t* a,
                     int64_t stride_a, const uint16_t* b, int64_t stride_b, float beta, float* c, int64_t stride_c);
// The beginning of dnnl_version_t.
struct Version {
  int major;
  int minor;
  int patch;
};

struct Library {
  Gemm gemm = nullptr;
  void (*set_num_threads)(int) = nullptr;  // OpenMP's, of the calling thread
  Bfloat16Library description;
};

constexpr const char* kFunction = "dnnl_gemm_bf16bf16f32";

template <typename Function>
Function Find(void* handle, const char* name) {
  return reinterpret_cast<Function>(dlsym(handle, name));
}

bool HasInstructions() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

// Whether /proc/cpuinfo lists a processor flag.
bool HasProcessorFlag(const std::string& flag) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) == 0) return (line + " ").find(" " + flag + " ") != std::string::npos;
  }
  return false;
}

// bf16 of a whole number below 256: exact.
uint16_t Encode(int64_t value) {
  const float number = static_cast<float>(value);
  return static_cast<uint16_t>(__builtin_bit_cast(uint32_t, number) >> 16);
}

// Whether the function computes small products of whole numbers, which are exact, in all forms that the engine uses.
bool ComputesRight(Gemm gemm) {
  constexpr int64_t kM = 5;
  constexpr int64_t kN = 7;
  constexpr int64_t kK = 9;
  constexpr int64_t kStride = 11;
  const auto value_a = [](int64_t i, int64_t p) { return (3 * i + 5 * p) % 13 - 6; };
  const auto value_b = [](int64_t p, int64_t j) { return (7 * p + 2 * j) % 17 - 8; };
  for (const char* forms : {"NN", "NT", "TN"}) {
    for (const float beta : {0.0f, 1.0f}) {
      const float alpha = 2 - beta;
      std::vector<uint16_t> a(kStride * kStride);
      std::vector<uint16_t> b(kStride * kStride);
      std::vector<float> c(kStride * kStride, beta == 0 ? __builtin_nanf("") : 100.0f);
      for (int64_t p = 0; p < kK; ++p) {
        for (int64_t i = 0; i < kM; ++i)
          a[static_cast<size_t>(forms[0] == 'N' ? i * kStride + p : p * kStride + i)] = Encode(value_a(i, p));
        for (int64_t j = 0; j < kN; ++j)
          b[static_cast<size_t>(forms[1] == 'N' ? p * kStride + j : j * kStride + p)] = Encode(value_b(p, j));
      }
      if (gemm(forms[0], forms[1], kM, kN, kK, alpha, a.data(), kStride, b.data(), kStride, beta, c.data(), kStride) != 0)
        return false;
      for (int64_t i = 0; i < kM; ++i) {
        for (int64_t j = 0; j < kN; ++j) {
          int64_t sum = 0;
          for (int64_t p = 0; p < kK; ++p) sum += value_a(i, p) * value_b(p, j);
          if (c[static_cast<size_t>(i * kStride + j)] != alpha * static_cast<float>(sum) + 100 * beta) return false;
        }
      }
    }
  }
  return true;
}

Library Open() {
  Library library;
  Bfloat16Library& description = library.description;
  if (!HasInstructions()) {
    description.why_not = "the processor has no avx512_bf16";
    return library;
  }
  void* handle = RTLD_DEFAULT;  // libraries that are linked into the process come first
  library.gemm = Find<Gemm>(handle, kFunction);
  for (const char* file : {"libdnnl.so.3", "libdnnl.so.2"}) {
    if (library.gemm != nullptr) break;
    handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) library.gemm = Find<Gemm>(handle, kFunction);
  }
  const auto version = library.gemm == nullptr ? nullptr : Find<const Version* (*)()>(handle, "dnnl_version");
  if (version == nullptr) {
    description.why_not = "there is no oneDNN (libdnnl.so.3 or libdnnl.so.2)";
    return library;
  }
  library.set_num_threads = Find<void (*)(int)>(handle, "omp_set_num_threads");
  description.name = "oneDNN " + std::to_string(version()->major) + "." + std::to_string(version()->minor) + "." +
                     std::to_string(version()->patch) + (HasProcessorFlag("amx_bf16") ? " (amx_bf16)" : " (avx512_bf16)");
  if (library.set_num_threads == nullptr) {
    description.why_not = description.name + " does not run on OpenMP, whose threads the engine can limit";
    return library;
  }
  library.set_num_threads(1);
  description.is_usable = ComputesRight(library.gemm);
  if (!description.is_usable) description.why_not = description.name + " computed a known product wrong";
  return library;
}

const Library& GetLibrary() {
  static const Library library = Open();
  return library;
}

void Run(char transposed_a, char transposed_b, int64_t m, int64_t n, int64_t k, float alpha, Matrix<const uint16_t> a,
         Matrix<const uint16_t> b, float beta, Matrix<float> c) {
  if (m == 0 || n == 0) return;
  const Library& library = GetLibrary();
  library.set_num_threads(1);  // of this thread, which may be a new one
  const auto stride = [](int64_t value) { return std::max<int64_t>(value, 1); };
  if (library.gemm(transposed_a, transposed_b, m, n, k, alpha, a.data, stride(a.stride), b.data, stride(b.stride), beta, c.data,
                   stride(c.stride)) == 0) {
    return;
  }
  std::fputs("oneDNN refused a matrix product: out of memory\n", stderr);
  std::abort();
}

}  // namespace

const Bfloat16Library& GetBfloat16Library() { return GetLibrary().description; }

void MultiplyTransposed(int64_t m, int64_t n, int64_t k, Matrix<const uint16_t> a, Matrix<const uint16_t> b, Matrix<float> c) {
  Run('N', 'T', m, n, k, 1, a, b, 0, c);
}

void Multiply(int64_t m, int64_t n, int64_t k, Matrix<const uint16_t> a, Matrix<const uint16_t> b, float beta, Matrix<float> c) {
  Run('N', 'N', m, n, k, 1, a, b, beta, c);
}

void MultiplyFirstTransposed(int64_t m, int64_t n, int64_t k, float alpha, Matrix<const uint16_t> a, Matrix<const uint16_t> b,
                             float beta, Matrix<float> c) {
  Run('T', 'N', m, n, k, alpha, a, b, beta, c);
}

}  // namespace headwater::cpu
