// What `headwaterctl top` shows: figures from two pages of metrics, as text and as JSON.
#ifndef HEADWATER_CLIENT_CTL_COMMAND_TOP_VIEW_H_
#define HEADWATER_CLIENT_CTL_COMMAND_TOP_VIEW_H_

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/ctl/metrics_page.h"
#include "headwater/client/types.h"

namespace headwater::ctl {

// Of one server over the time between two pages. Rates are a second; a counter that fell (another process) counts from 0.
struct TopFigures {
  struct Traffic {
    double micro_batches = 0;
    double bytes_in = 0;
    double bytes_out = 0;
  };

  struct Rank {
    double compute = 0, wait = 0, communicate = 0;  // shares of the time
  };

  double seconds = 0;  // between the pages
  bool serving = false;
  std::string version;
  std::string engine;
  double uptime_s = 0;
  double tokens = 0;
  double steps = 0;
  double contributions = 0;
  double non_finite_rows = 0;
  std::map<std::string, double> micro_batches;  // by outcome
  std::map<std::string, double> refusals;       // by reason; those that were not 0
  std::map<std::string, Traffic> transports;    // by transport
  std::map<std::string, double> phase_seconds;  // by phase, on average; those that a micro-batch went through
  double busy = 0;                              // share of the time
  std::map<int64_t, Rank> ranks;                // of a group of processes, by rank
  std::optional<double> product_flops;          // a second while busy
  std::optional<double> floor;                  // that over the machine's product rate, where it is known
  std::optional<double> chunk_fill;             // on average
  double queue_depth = 0, max_queue_depth = 0;  // now, as all that follows
  double waiting_calls = 0, waiting_contributions = 0;
  double in_flight_bytes = 0, max_in_flight_bytes = 0;
  double connections = 0, sessions = 0;
  double resident_bytes = 0, budget_bytes = 0, planned_bytes = 0;
  std::map<std::string, double> planned_by_purpose;  // those that are not 0
};

// `now`: seconds since 1970 at the second page. `seconds` > 0.
TopFigures FiguresOf(const MetricsPage& before, const MetricsPage& after, double seconds, double now);

// Several lines. If the heads cannot be listed the reason stands in their place; as JSON they are null then, which no heads are
// not, and `heads_error` says why.
std::string TopText(const std::string& server, const TopFigures& figures,
                    const absl::StatusOr<std::vector<client::HeadInfo>>& heads);
nlohmann::json TopJson(const std::string& server, const TopFigures& figures,
                       const absl::StatusOr<std::vector<client::HeadInfo>>& heads);

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_COMMAND_TOP_VIEW_H_
