// Random tensors, and statuses as test failures.
#ifndef HEADWATER_TESTS_E2E_CPP_SUPPORT_TEST_TENSORS_H_
#define HEADWATER_TESTS_E2E_CPP_SUPPORT_TEST_TENSORS_H_

#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace headwater::e2e {

inline std::vector<float> RandomFloats(uint32_t seed, int64_t count, float deviation) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, deviation);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

inline std::vector<int32_t> RandomTargets(uint32_t seed, int64_t count, int64_t vocab_size) {
  std::mt19937 generator(seed);
  std::vector<int32_t> targets(static_cast<size_t>(count));
  for (int32_t& target : targets) target = static_cast<int32_t>(generator() % static_cast<uint64_t>(vocab_size));
  return targets;
}

inline std::string Bytes(const std::vector<float>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

// The value, or a throw that fails the test with the status.
template <typename T>
T Value(absl::StatusOr<T> value) {
  if (!value.ok()) throw std::runtime_error(value.status().ToString());
  return *std::move(value);
}

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_SUPPORT_TEST_TENSORS_H_
