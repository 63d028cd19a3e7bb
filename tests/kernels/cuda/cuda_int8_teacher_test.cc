// The int8 product by itself: the error of its logits against fp64 is the one that is reported.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/products/int8_product.h"
#include "tests/kernels/cuda/cuda_support.h"
#include "tests/kernels/cuda/cuda_test_environment.h"

namespace headwater::testing {
namespace {

const bool kSkipsWithoutGpu = SkipTestsWithoutGpu();

Buffer ToDevice(const std::vector<float>& values) {
  Buffer buffer(BufferKind::kDevice, static_cast<int64_t>(values.size() * sizeof(float)));
  CopyMemory(buffer.as<void>(), values.data(), buffer.bytes());
  return buffer;
}

struct Int8Matrix {
  Int8Matrix(const std::vector<float>& values, int64_t row_count, int64_t width)
      : memory(BufferKind::kDevice, cuda::Int8Bytes(row_count, width)),
        rows(cuda::LayOutInt8(memory.as<void>(), row_count, width)) {
    const Buffer source = ToDevice(values);
    CheckCuda(cuda::LaunchQuantizeRows({source.as<void>(), row_count, width, width, cuda::Element::kFloat32}, rows, nullptr),
              "LaunchQuantizeRows");
    CheckCuda(cudaDeviceSynchronize(), "LaunchQuantizeRows");
  }
  Buffer memory;
  cuda::Int8Rows rows;
};

struct Shape {
  int64_t rows, vocab, width;
};

TEST(Int8Product, HasTheErrorThatIsReported) {
  for (const auto [rows, vocab, width] :
       {Shape{300, 2001, 576}, Shape{129, 321, 100}, Shape{17, 641, 4096}, Shape{257, 320, 5120}}) {
    for (const float outlier : {1.0f, 30.0f}) {  // of every 97th column of the hidden states
      SCOPED_TRACE(::testing::Message() << rows << " x " << vocab << " x " << width << ", outlier " << outlier);
      std::mt19937_64 random(7);
      std::normal_distribution<float> normal;
      std::vector<float> hidden(static_cast<size_t>(rows * width)), weight(static_cast<size_t>(vocab * width));
      for (size_t i = 0; i < hidden.size(); ++i) {
        hidden[i] = normal(random) * (i % static_cast<size_t>(width) % 97 == 0 ? outlier : 1.0f);
      }
      for (float& value : weight) value = 0.05f * normal(random);
      constexpr int64_t kBadRow = 5;
      hidden[static_cast<size_t>(kBadRow * width + 3)] = std::numeric_limits<float>::infinity();

      const Int8Matrix x(hidden, rows, width), w(weight, vocab, width);
      const int64_t stride = vocab + vocab % 2;
      const Buffer out(BufferKind::kDevice, rows * stride * 4), means(BufferKind::kDevice, 16),
          errors(BufferKind::kDevice, rows * 4);
      CheckCuda(cuda::LaunchInt8Product(x.rows, w.rows, out.as<float>(), stride, nullptr), "LaunchInt8Product");
      CheckCuda(cuda::LaunchInt8Means(w.rows, means.as<double>(), nullptr), "LaunchInt8Means");
      CheckCuda(cuda::LaunchInt8Errors(x.rows, means.as<double>(), 1, errors.as<float>(), nullptr), "LaunchInt8Errors");
      std::vector<float> logits(static_cast<size_t>(rows * stride)), reported(static_cast<size_t>(rows));
      CopyMemory(logits.data(), out.as<void>(), out.bytes());
      CopyMemory(reported.data(), errors.as<void>(), errors.bytes());

      double measured = 0, expected = 0;
      for (int64_t row = 0; row < rows; ++row) {
        double squares = 0;
        for (int64_t column = 0; column < vocab; ++column) {
          double exact = 0;
          for (int64_t k = 0; k < width; ++k) {
            exact += static_cast<double>(hidden[static_cast<size_t>(row * width + k)]) *
                     static_cast<double>(weight[static_cast<size_t>(column * width + k)]);
          }
          const double logit = static_cast<double>(logits[static_cast<size_t>(row * stride + column)]);
          squares += (logit - exact) * (logit - exact);
        }
        if (row == kBadRow) {
          EXPECT_TRUE(std::isnan(squares));
          continue;
        }
        measured += squares / static_cast<double>(vocab);
        expected += static_cast<double>(reported[static_cast<size_t>(row)]);
      }
      const double ratio = std::sqrt(expected / measured);
      EXPECT_TRUE(ratio > 0.9 && ratio < 1.1) << "reported over measured: " << ratio;
    }
  }
}

}  // namespace
}  // namespace headwater::testing
