// The loss terms of a micro-batch: from the decoded header to what heads and engine take.
#ifndef HEADWATER_SERVER_SERVICE_REQUEST_LOSS_TERMS_H_
#define HEADWATER_SERVER_SERVICE_REQUEST_LOSS_TERMS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/heads/head.h"
#include "server/heads/head_registry.h"
#include "server/service/access/access.h"
#include "server/service/request/loss_request.h"

namespace headwater::service {

// "header.terms[index]".
std::string TermField(size_t index);

// Finds the heads of all terms, checks the header against them, and fills in `submission->terms`, except rows and outputs. Spans
// point into `request`, which must stay where it is; class weights are cut to the columns that have probability. kHeadNotFound,
// kPermissionDenied, kShapeMismatch, kMissingField, kInvalidCombination, kVocabSizeMismatch.
absl::Status BuildTerms(const Caller& caller, const heads::HeadRegistry& registry, MicroBatchRequest* request,
                        heads::Submission* submission);

// Whether the micro-batch, while it is undecided, must be kept as its rows: no free slot changes that.
bool MustBeHeld(const heads::Submission& submission);

// A use of each head of terms that BuildTerms() has made.
std::vector<heads::HeadUse> UseHeads(const heads::Submission& submission);

// kTargetOutOfVocab, and the errors of CheckTopKRows(). For terms that BuildTerms() has made.
absl::Status CheckTargets(const MicroBatchRequest& request, const heads::Submission& submission);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_REQUEST_LOSS_TERMS_H_
