#!/usr/bin/env python3
"""Does the history test find bugs? Builds it with one line of server/heads changed at a time, and expects it to fail each time.

    mutants.py BUILD_DIR [NAME...]
    mutants.py --fit

BUILD_DIR holds a build of server_history_test. A copy of the source is changed in BUILD_DIR/mutants, compiled with the flags of
the original, and linked in its place; the sources themselves are not touched. Exits non-zero if a mutant is not found, or if a
change no longer fits its source (then the table below wants a new line). The second form looks at that alone, in no time.
"""

import json
import pathlib
import re
import shlex
import subprocess
import sys

# A bug that needs a head to be deleted, made again, and lost before its first save shows first in the 4382nd.
HISTORIES = 12000
TIMEOUT_SECONDS = 600

# name: what a server with this bug would do; file; text that occurs once; what it becomes.
MUTANTS = [
    (
        "takes_a_discarded_attempt_again",
        "server/heads/steps/step_ledger.cc",
        "if (attempt <= record.tombstone_attempt) {",
        "if (attempt < record.tombstone_attempt) {",
    ),
    (
        "lets_a_superseded_attempt_in",
        "server/heads/steps/step_ledger.cc",
        "if (attempt < record.fence_attempt) {",
        "if (attempt + 1 < record.fence_attempt) {",
    ),
    ("takes_one_record_too_many", "server/heads/steps/step_ledger.cc", ">= max_micro_batches_", "> max_micro_batches_"),
    (
        "replays_other_rows",
        "server/heads/steps/step_ledger.cc",
        "if (record.digest == digest) return",
        "if (record.digest.has_value()) return",
    ),
    (
        "replays_a_commit_with_another_factor",
        "server/heads/steps/step_ledger.cc",
        "if (record.factor == factor) return false;",
        "return false;",
    ),
    (
        "seals_with_unexpected_micro_batches",
        "server/heads/steps/step_ledger.cc",
        "record.state == ContributionState::kCommitted && !is_expected",
        "record.state == ContributionState::kStaged && !is_expected",
    ),
    ("keeps_what_a_higher_attempt_dropped", "server/heads/steps/step_transactions.cc", "if (dropped) Drop(micro_batch);", ""),
    (
        "computes_what_is_known_while_its_rows_come",
        "server/heads/steps/step_ledger.cc",
        "if (!digest.has_value()) return BeginDecision::kReplay;",
        "if (!digest.has_value()) return known->digest.has_value() ? BeginDecision::kCompute : BeginDecision::kReplay;",
    ),
    (
        "commits_rows_that_were_cancelled_as_they_came",
        "server/heads/steps/submission_run.cc",
        "HEADWATER_RETURN_IF_ERROR(CheckWanted());\n  if (adds_) {",
        "if (adds_) {",
    ),
    (
        "loses_a_head_to_rows_that_never_came",
        "server/heads/steps/submission_run.cc",
        "form_ == ContributionForm::kDirect && decided_;",
        "form_ == ContributionForm::kDirect;",
    ),
    (
        "refuses_rows_that_stall",
        "server/heads/steps/submission_run.cc",
        "if (decided_ || !submission_.incoming->stalled()) return status;",
        "if (!status.ok()) return status;",
    ),
    (
        "acknowledges_what_a_lost_head_has_forgotten",
        "server/heads/steps/submission_run.cc",
        "  const absl::Status status = CheckNotLost();\n  for (Head* target : targets_) {\n    // Also",
        "  const absl::Status status;\n  for (Head* target : targets_) {\n    // Also",
    ),
    (
        "forgets_what_the_other_head_of_a_lost_one_has",
        "server/heads/steps/submission_run.cc",
        "in those.\n    target->steps.ledger().FinishCommitted(id(), form_, CountsOf(target)).IgnoreError();",
        "in those.\n    if (status.ok()) target->steps.ledger().FinishCommitted(id(), form_, CountsOf(target)).IgnoreError();",
    ),
    (
        "commits_held_rows_with_a_teacher_that_changed",
        "server/heads/steps/held_rows.cc",
        "if (version == held_version) continue;",
        "if (version >= 0) continue;",
    ),
    (
        "lets_anybody_decide",
        "server/heads/steps/decide.cc",
        "if (!pending.session().has_value() || pending.session() == session) return absl::OkStatus();",
        "if (micro_batch >= 0) return absl::OkStatus();",
    ),
    (
        "asks_for_the_owner_of_a_lower_attempt",
        "server/heads/steps/decide.cc",
        "if (attempt > pending->attempt()) continue;",
        "",
    ),
    ("forgets_the_factor_of_held_rows", "server/heads/steps/held_rows.cc", "term.loss_scale *= arguments.factor;", ""),
    (
        "takes_token_factors_of_other_rows",
        "server/heads/steps/held_rows.cc",
        "token_factors.begin() + term.row_start;",
        "token_factors.begin();",
    ),
    (
        "keeps_the_epoch_for_a_new_life",
        "server/heads/head.cc",
        "  current_epoch = NewEpoch();",
        "  if (steps.open().step < 0) current_epoch = NewEpoch();",
    ),
    ("deletes_a_head_in_use", "server/heads/head.cc", "if (!force && InUse())", "if (!force && running_calls > 0)"),
    (
        "swaps_half_of_the_weights_in",
        "server/heads/head_weights.cc",
        "if (!weights.AddShadow(tensor, checksum)) return ReplaceReply{.head = Describe()};",
        "weights.AddShadow(tensor, checksum);",
    ),
    ("forgets_the_updates_of_a_checkpoint", "server/heads/head_weights.cc", "weights.SetUpdateCount(info->update_count);", ""),
    ("changes_the_epoch_while_loading", "server/heads/head_weights.cc", "if (was_loading) current_epoch = epoch_before;", ""),
    ("replays_an_update_with_other_arguments", "server/heads/head_steps.cc", "applied.arguments == arguments &&", ""),
    (
        "brings_back_deleted_heads",
        "server/heads/head_registry.cc",
        "store->Forget(name.tenant, name.head) : absl::OkStatus()",
        "absl::OkStatus() : absl::OkStatus()",
    ),
    (
        "lets_a_tenant_have_one_head_more",
        "server/heads/head_registry.cc",
        "tenant_heads >= limits_.max_heads_per_tenant",
        "tenant_heads > limits_.max_heads_per_tenant",
    ),
    (
        "ends_a_lease_while_a_call_runs",
        "server/heads/session_registry.cc",
        "session.running_calls == 0 && !session.ended &&",
        "!session.ended &&",
    ),
    (
        "lets_an_ended_lease_be_used",
        "server/heads/session_registry.cc",
        "clock_() < session.lease_end ?",
        "session.running_calls == 0 ?",
    ),
    (
        "brings_back_the_oldest_checkpoint",
        "server/checkpoint/checkpoint_store.cc",
        "return a.sequence > b.sequence;",
        "return a.sequence < b.sequence;",
    ),
    (
        "brings_back_a_deleted_heads_checkpoint",
        "server/checkpoint/checkpoint_store.cc",
        "return !BelongsTo(info, *first_sequence);",
        "return info.sequence == 0;",
    ),
]


ROOT = pathlib.Path(__file__).resolve().parents[4]


def compile_commands(build):
    """The entry of compile_commands.json for each source, by its path; in a unity build that of the file that includes it."""
    entries = {entry["file"]: entry for entry in json.loads((build / "compile_commands.json").read_text())}
    for file, entry in list(entries.items()):
        if "/Unity/unity_" in file:
            entries.update(dict.fromkeys(re.findall(r'#include "(.+)"', pathlib.Path(file).read_text()), entry))
    return entries


def check_fit():
    failed = [(name, count) for name, file, old, _ in MUTANTS if (count := (ROOT / file).read_text().count(old)) != 1]
    for name, count in failed:
        print(f"{name} does not fit: its text occurs {count} times")
    return 1 if failed else 0


def main(build_dir, wanted):
    build = pathlib.Path(build_dir).resolve()
    out = build / "mutants"
    out.mkdir(exist_ok=True)
    commands = compile_commands(build)
    listing = subprocess.run(
        ["ninja", "-C", str(build), "-t", "commands", "server_history_test"],
        check=True,
        capture_output=True,
        text=True,
    )
    all_commands = listing.stdout.splitlines()
    link = next(line for line in reversed(all_commands) if "-o tests/server_history_test" in line)
    failed = []
    for name, file, old, new in MUTANTS:
        if wanted and name not in wanted:
            continue
        verdict = try_mutant(build, out, commands, link, name, file, old, new)
        print(f"{name:46} {file:38} {verdict}", flush=True)
        if not verdict.startswith("found"):
            failed.append(name)
    print(f"{len(failed)} mutants were not found" + (": " + ", ".join(failed) if failed else ""))
    return 1 if failed else 0


def try_mutant(build, out, commands, link, name, file, old, new):
    source = ROOT / file
    text = source.read_text()
    if text.count(old) != 1:
        return f"does not fit: its text occurs {text.count(old)} times"
    copy = out / f"{name}.cc"
    copy.write_text(text.replace(old, new))
    entry = commands[str(source)]
    # What else a unity build compiles with it stays with it, because the linker takes whole objects.
    unit = copy
    if entry["file"] != str(source):
        unit = copy.with_suffix(".unity.cc")
        unit.write_text(pathlib.Path(entry["file"]).read_text().replace(f'"{source}"', f'"{copy}"'))
    compile_words = shlex.split(entry["command"])
    compile_words[compile_words.index("-o") + 1] = str(copy.with_suffix(".o"))
    compile_words[compile_words.index("-c") + 1] = str(unit)
    compile_words.append("-Wno-error")  # what the change left unused
    compiled = subprocess.run(compile_words, cwd=entry["directory"], capture_output=True, text=True)
    if compiled.returncode != 0:
        return "does not compile:\n" + compiled.stderr
    # Before the library that has the original: the linker takes the first.
    program = out / name
    one = link.replace("-o tests/server_history_test", f"{copy.with_suffix('.o')} -o {program}", 1)
    linked = subprocess.run(one, shell=True, cwd=build, capture_output=True, text=True)
    if linked.returncode != 0:
        return "does not link:\n" + linked.stderr
    try:
        ran = subprocess.run(
            [str(program), "--gtest_filter=*AgreesWithTheModel*"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            env={"HISTORIES": str(HISTORIES), "PATH": "/usr/bin:/bin"},
        )
    except subprocess.TimeoutExpired:
        return "found: it never ends"
    finally:
        program.unlink()
    lines = [line for line in ran.stdout.splitlines() if " fails at event " in line]
    if ran.returncode == 0:
        return "NOT FOUND"
    return "found: " + (lines[0] if lines else f"ends with {ran.returncode}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1:] == ["--fit"]:
        sys.exit(check_fit())
    sys.exit(main(sys.argv[1], set(sys.argv[2:])))
