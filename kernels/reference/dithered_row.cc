#include "kernels/reference/dithered_row.h"

#include <cmath>
#include <vector>

#include "kernels/core/loss/dither.h"
#include "kernels/reference/storage.h"

namespace headwater::reference {
namespace {

Real PowerOfTwoBelow(Real value) { return std::exp2(std::floor(std::log2(value))); }

// q, moved to where q times `factor` and the row's factor is a number of the resolution's type.
Real Representable(Real q, Real factor, const Resolution& resolution) {
  const Real all = factor * resolution.factor;
  if (resolution.unit_type == DataType::kFloat32 || all == 0) return q;
  return RoundTo(resolution.unit_type, static_cast<double>(q * all)) / all;
}

// An entry at resolution q.
Real Dithered(Real entry, Real q, const Resolution& resolution, size_t column, GradientDither* sums) {
  Real ratio = std::abs(entry) / q;
  if (resolution.entry_type != DataType::kFloat32) ratio = RoundTo(resolution.entry_type, static_cast<double>(ratio));
  sums->squared_norm += static_cast<double>(ratio * ratio * q * q);
  if (ratio >= 1) return std::copysign(ratio * q, entry);
  sums->entry_count += 1;
  sums->squared_error += static_cast<double>(ratio * (1 - ratio) * q * q);
  const DitherKey key = MakeDitherKey(resolution.seed, resolution.row);
  const Real draw = static_cast<Real>(DitherDraw(key, static_cast<uint32_t>(column)));
  const Real tail = static_cast<Real>(DitherTail(key, static_cast<uint32_t>(column)));
  return std::ldexp(draw, 31) + tail < std::floor(std::ldexp(ratio, 47)) ? std::copysign(q, entry) : 0;
}

}  // namespace

void DitherCrossEntropy(absl::Span<const Real> u, absl::Span<const Real> slopes, int64_t target, const Resolution& resolution,
                        RowLoss* loss, GradientDither* sums) {
  const size_t y = static_cast<size_t>(target);
  Real sum = 0;
  for (size_t v = 0; v < u.size(); ++v) {
    if (v != y) sum += std::exp(u[v] - u[y]);
  }
  const Real q = Representable(PowerOfTwoBelow(resolution.tau * sum) / (1 + sum), loss->probability_mass, resolution);
  for (size_t v = 0; v < u.size(); ++v) {
    if (v == y) continue;
    const Real entry = std::exp(u[v] - u[y]) / (1 + sum) * slopes[v];
    loss->gradient[v] += loss->probability_mass * (Dithered(entry, q, resolution, v, sums) - entry) / slopes[v];
  }
  const Real missing = sum / (1 + sum) * slopes[y];
  sums->squared_norm += static_cast<double>(missing * missing);
}

void DitherDivergence(absl::Span<const Real> slopes, const JsdOptions& options, const Resolution& resolution, RowLoss* loss,
                      GradientDither* sums) {
  const Real temperature = options.student_temperature;
  std::vector<Real> entries;
  Real magnitudes = 0;
  for (size_t v = 0; v < loss->gradient.size(); ++v) {
    entries.push_back(loss->gradient[v] * temperature * slopes[v]);
    magnitudes += std::abs(entries.back());
  }
  const Real q = Representable(PowerOfTwoBelow(resolution.tau * magnitudes / 2), 1 / temperature, resolution);
  for (size_t v = 0; v < entries.size(); ++v) {
    loss->gradient[v] = Dithered(entries[v], q, resolution, v, sums) / (temperature * slopes[v]);
  }
}

}  // namespace headwater::reference
