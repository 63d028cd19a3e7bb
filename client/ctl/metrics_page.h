// A server's page of metrics: fetched over HTTP and read.
#ifndef HEADWATER_CLIENT_CTL_METRICS_PAGE_H_
#define HEADWATER_CLIENT_CTL_METRICS_PAGE_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace headwater::ctl {

// GET http://ADDRESS/metrics, where `address` is host:port ([::1]:9464 for IPv6, with a zone [fe80::1%eth0]:9464), in plain text;
// at most 16 MiB, within `timeout`. Unavailable, saying why, if it cannot be had or the answer is not 200; InvalidArgument for
// another form of address.
absl::StatusOr<std::string> FetchMetrics(const std::string& address, absl::Duration timeout);

// The samples of a page in Prometheus' text format.
class MetricsPage {
 public:
  struct Sample {
    std::map<std::string, std::string> labels;
    double value = 0;
  };

  // InvalidArgument, naming the line, for text that is no such page. Comments are passed over.
  static absl::StatusOr<MetricsPage> Parse(absl::string_view text);

  // The sum of the samples with this name whose labels include `labels`; empty if there is none.
  std::optional<double> Sum(const std::string& name, const std::map<std::string, std::string>& labels = {}) const;
  // The values that `label` has, each with the sum of its samples.
  std::map<std::string, double> SumBy(const std::string& name, const std::string& label) const;
  // A label of the first sample of this name; empty without.
  std::string Label(const std::string& name, const std::string& label) const;

 private:
  // Empty without samples of that name.
  const std::vector<Sample>& Family(const std::string& name) const;

  std::map<std::string, std::vector<Sample>> samples_;  // by name
};

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_METRICS_PAGE_H_
