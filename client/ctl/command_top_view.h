// The view of `headwaterctl top`: figures from two pages of metrics, as JSON and as text.
#ifndef HEADWATER_CLIENT_CTL_COMMAND_TOP_VIEW_H_
#define HEADWATER_CLIENT_CTL_COMMAND_TOP_VIEW_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/ctl/metrics_page.h"
#include "headwater/client/types.h"

namespace headwater::ctl {

// The document of `--json`: one server over the `seconds` > 0 between two pages. Rates are a second; a counter that fell (another
// process) counts from 0. `now`: seconds since 1970 at the second page. If the heads cannot be listed they are null, which no heads
// are not, and `heads_error` says why.
nlohmann::json TopJson(const std::string& server, const MetricsPage& before, const MetricsPage& after, double seconds, double now,
                       const absl::StatusOr<std::vector<client::HeadInfo>>& heads);

// Several lines of that document. If the heads cannot be listed the reason stands in their place.
std::string TopText(const nlohmann::json& figures, const absl::StatusOr<std::vector<client::HeadInfo>>& heads);

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_COMMAND_TOP_VIEW_H_
