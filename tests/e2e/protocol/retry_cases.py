"""What a client makes again: when, under which attempt, in which session."""

from exchange import cases

# ---- what is retried ----------------------------------------------------------------------------------------------------

# Calls whose repetition adds nothing, by method.
REPEATABLE = {
    "ComputeLoss": "loss 0",
    "CommitMicroBatch": "commit 0 factor=0.5",
    "DiscardMicroBatch": "discard 0",
    "SealStep": "seal expected=1",
    "ApplyOptimizerStep": "apply expected=1",
    "DiscardGradient": "discard_gradient",
    "AddGradient": "gradient_part 1",
    "DownloadGradient": "gradient",
    "GetGradientNorm": "gradient_norm",
    "DownloadWeights": "weight",
    "GetStep": "step_state",
    "GetHead": "info",
    "TakeHead": "take",
    "SaveCheckpoint": "save one overwrite",
    "DeleteCheckpoint": "delete_checkpoint one",
    "UploadWeights": "upload",
    "ListHeads": "list",
}
# Calls that a repetition would answer otherwise.
UNREPEATABLE = {
    "CreateHead": ("CreateHead", "create new"),
    "DeleteHead": ("DeleteHead", "delete"),
    "TakeHead of one epoch": ("TakeHead", "take if_current"),
    "RestoreCheckpoint": ("RestoreCheckpoint", "restore one"),
    "LoadWeights": ("LoadWeights", "load model.safetensors"),
    "SaveCheckpoint without overwrite": ("SaveCheckpoint", "save one"),
}
REFUSALS_FOR_WANT_OF_ROOM = ("QUEUE_FULL", "IN_FLIGHT_BYTES_EXCEEDED", "ORDERED_WINDOW_FULL", "STAGING_FULL/1")
FINAL = """
    INVALID_FIELD STEP_MISMATCH STEP_SEALED MICRO_BATCH_CONFLICT MICRO_BATCH_DISCARDED MICRO_BATCH_IN_PROGRESS ATTEMPT_SUPERSEDED
    EPOCH_FENCED STEP_LOST STEP_CONFLICT MEMORY_BUDGET_EXCEEDED QUOTA_EXCEEDED ENGINE_FAILED NOT_SESSION_OWNER DEADLINE_EXCEEDED
    FEATURE_NOT_BUILT
""".split()

for method, call in REPEATABLE.items():
    cases(f"""
        {method} is made once without retries
            connect max_attempts=1; ! clear; ! answers {method}: CUT*; {call} -> UNAVAILABLE; ? calls {method}: 1
        {method} is retried when it was cut or refused for want of room
            connect max_attempts=4; ! clear; ! answers {method}: CUT DRAINING QUEUE_FULL; {call}
            ? calls {method}: 4; ? same {method}:
        {method} is retried when the server cut it off
            connect max_attempts=4; ! clear; ! answers {method}: CANCELLED; {call}; ? calls {method}: 2
        {method} is tried as often as the policy says
            connect max_attempts=4; ! clear; ! answers {method}: CUT*; {call} -> UNAVAILABLE; ? calls {method}: 4
        {method} waits for a server that is away when there is a replay log
            connect replay_bytes=1000000 max_attempts=1; ! clear
            ! answers {method}: CUT*5 DRAINING*3 STARTING*2; {call}; ? calls {method}: 11
        {method} waits for a server that restarts when there is a replay log
            connect replay_bytes=1000000; ! clear; ! answers {method}: ENGINE_FAILED!*6; {call}; ? calls {method}: 7
    """)
for title, (method, call) in UNREPEATABLE.items():
    cases(f"""
        {title} is retried only if nothing was done
            ! clear; ! answers {method}: CUT; {call} -> UNAVAILABLE; ? calls {method}: 1
            ! answers {method}: DRAINING; {call}; ? calls {method}: 3
        {title} is not repeated when the server cut it off
            ! clear; ! answers {method}: CANCELLED; {call} -> UNAVAILABLE; ? calls {method}: 1
        {title} does not wait for a server that is away
            connect replay_bytes=1000000; ! clear; ! answers {method}: CUT; {call} -> UNAVAILABLE; ? calls {method}: 1
        {title} does not wait for a server that restarts
            connect replay_bytes=1000000; ! clear; ! answers {method}: ENGINE_FAILED!; {call} -> ENGINE_FAILED; ? calls {method}: 1
    """)
for reason in (*REFUSALS_FOR_WANT_OF_ROOM, "STRIPE_LOST", "TRANSFER_NOT_FOUND", "REGION_NOT_FOUND"):
    cases(f"""
        {reason.partition("/")[0]} is retried
            ! answers ComputeLoss: {reason}; loss 0; ? attempts ComputeLoss: 0 1
    """)
for reason in FINAL:
    cases(f"""
        {reason} is final
            ! answers ComputeLoss: {reason}; loss 0 -> {reason}; ? calls ComputeLoss: 1
            ! answers CommitMicroBatch: {reason}; commit 0 -> {reason}; ? calls CommitMicroBatch: 1
            ! answers SealStep: {reason}; seal expected=1 -> {reason}; ? calls SealStep: 1
    """)
cases("""
    attaching is retried only if nothing was done
        ! answers CreateHead: CUT; attach new -> UNAVAILABLE; ? calls CreateHead: 1
        ! answers CreateHead: DRAINING; attach new; ? calls CreateHead: 3
    MICRO_BATCH_IN_PROGRESS is retried when the own earlier attempt holds the micro-batch
        ! answers ComputeLoss: CUT MICRO_BATCH_IN_PROGRESS; loss 0; ? attempts ComputeLoss: 0 1 2
    a staging slot of the own session is not waited for
        ! answers ComputeLoss: STAGING_FULL; loss 0 explicit -> STAGING_FULL; ? calls ComputeLoss: 1
    without a replay log a server that restarts is final
        ! answers SealStep: STEP_LOST!; seal expected=1 -> STEP_LOST; ? calls SealStep: 1
""")

# ---- uploads ------------------------------------------------------------------------------------------------------------

cases("""
    an upload that was refused before its last byte is sent again
        ! answers UploadWeights: CUT DRAINING; upload; ? calls UploadWeights: 3
    weights set outside of a step are not sent again after the last byte
        ! cut_upload 128; upload -> UNAVAILABLE; ? calls UploadWeights: 1
    weights that close a step are sent again after the last byte
        seal expected=1; ! cut_upload 128; replace; ? calls UploadWeights: 2; ? same UploadWeights:
""")

# ---- how long is waited -------------------------------------------------------------------------------------------------

cases("""
    the back-off doubles to its bound
        connect max_attempts=5 backoff_ms=40 max_backoff_ms=100
        ! answers CommitMicroBatch: CUT*; commit 0 -> UNAVAILABLE
        ? gaps CommitMicroBatch: 0.02 0.04 0.05 0.05
        ? took: 0-2
    the delay that the server asks for is kept
        ! answers SealStep: QUEUE_FULL/150*; seal expected=1 -> QUEUE_FULL; ? gaps SealStep: 0.15 0.15
    a wait that would outlast the call is not begun
        ! answers SealStep: QUEUE_FULL/60000; seal expected=1 timeout_ms=2000 -> QUEUE_FULL; ? took: 0-1.5
        ? calls SealStep: 1
        ! answers CommitMicroBatch: QUEUE_FULL/60000; commit 0 timeout_ms=2000 -> QUEUE_FULL; ? took: 0-1.5
        ? calls CommitMicroBatch: 1
    all attempts together keep to the timeout
        connect max_attempts=1000 backoff_ms=50
        ! answers ComputeLoss: CUT*; loss 0 timeout_ms=500 -> UNAVAILABLE|DEADLINE_EXCEEDED
        ? took: 0.2-2
        ? calls ComputeLoss: 2-25
    an absent server is waited for until shortly before the deadline
        connect replay_bytes=1000000 max_attempts=1 backoff_ms=400 max_backoff_ms=60000
        ! answers SealStep: CUT*; seal expected=1 timeout_ms=4000 -> UNAVAILABLE; ? took: 2.8-4.5; ? calls SealStep: 4-9
        ! answers ComputeLoss: CUT*; loss 0 timeout_ms=4000 -> UNAVAILABLE; ? took: 2.8-4.5; ? calls ComputeLoss: 4-9
    an absent server that asks for a delay is not asked sooner
        connect replay_bytes=1000000
        ! answers SealStep: STARTING/1400; seal expected=1; ? took: 1.4-3
        ! answers SealStep: STARTING/30000; seal expected=1 timeout_ms=5000 -> STARTING; ? took: 0-4
    with a replay log a server that answers is tried as often as without
        connect replay_bytes=1000000
        ! answers SealStep: SHARD_NOT_READY*; seal expected=1 -> SHARD_NOT_READY; ? calls SealStep: 3
    waiting for an absent server uses up no attempts
        connect replay_bytes=1000000
        ! answers ComputeLoss: CUT*6 STAGING_FULL/1*; loss 0 explicit -> STAGING_FULL; ? calls ComputeLoss: 9
    cancellation ends the wait for the next attempt
        connect backoff_ms=60000
        ! answers CommitMicroBatch: CUT*; start c commit 0; ? until CommitMicroBatch: 1; ! sleep 0.05; ? pending: c
        cancel c; end c -> CANCELLED; ? took: 0-5
        ! answers ComputeLoss: CUT*; start l loss 0; ? until ComputeLoss: 1; ! sleep 0.05
        cancel l; end l -> CANCELLED; ? took: 0-5
""")

# ---- attempts -----------------------------------------------------------------------------------------------------------

cases("""
    a decision names the attempt that was submitted last
        connect max_attempts=5
        ! answers ComputeLoss: CUT STAGING_FULL/1
        loss 7 explicit -> attempt=2 state=STAGED
        ! answers CommitMicroBatch: CUT
        commit 7 contribution factor=0.5
        commit 7 factor=0.5
        discard 7
        loss 8 explicit -> attempt=0
        commit 8
        ? attempts ComputeLoss: 0 1 2 0
        ? attempts CommitMicroBatch: 2 2 2 0
        ? attempts DiscardMicroBatch: 2
    what follows a failed loss names no earlier attempt
        ! answers ComputeLoss: STAGING_FULL/1*3
        loss 7 explicit -> STAGING_FULL
        ? attempts ComputeLoss: 0 1 2
        ! answers ComputeLoss: CUT*3
        loss 7 explicit -> UNAVAILABLE
        ? attempts ComputeLoss: 0 1 2 2 3 4
        discard 7
        ? attempts DiscardMicroBatch: 5
        loss 7 explicit -> attempt=5
        loss 7 explicit attempt=9 -> attempt=9
        commit 7
        ? attempts CommitMicroBatch: 9
        loss 8 -> attempt=0
    a named attempt is not below those that retries have come to from it
        ! answers ComputeLoss: STAGING_FULL/1*3
        loss 5 explicit attempt=2 -> STAGING_FULL
        loss 5 explicit attempt=2 -> attempt=4
        ? attempts ComputeLoss: 2 3 4 4
    a named attempt that the caller itself has gone beyond is sent as it is
        loss 5 explicit attempt=7 -> attempt=7
        loss 5 explicit attempt=4 -> attempt=4
        loss 5 explicit attempt=7 -> attempt=7
    what adds nothing has no attempt
        ! answers ComputeLoss: CUT; forward -> attempt=0; ? attempts ComputeLoss: 0 0
""")

# ---- sessions -----------------------------------------------------------------------------------------------------------

cases("""
    the first explicit micro-batch opens the session and closing the client ends it
        connect lease_ms=7500
        loss 0
        forward
        commit 9
        ? calls OpenSession: 0
        loss 1 explicit
        commit 1
        loss 2 explicit
        discard 2
        loss 3
        ? calls OpenSession: 1
        ? leases: 7500
        ? sessions ComputeLoss: - - 1 1 -
        ? sessions CommitMicroBatch: - 1
        ? sessions DiscardMicroBatch: 1
        ? calls CloseSession: 0
        close
        ? calls CloseSession: 1
        ? open_sessions: 0
    without a lease there is no session
        connect lease_ms=0; loss 0 explicit; commit 0
        ? sessions ComputeLoss: -; ? sessions CommitMicroBatch: -; ? calls OpenSession: 0
    the lease is renewed on a connection of its own
        connect lease_ms=150; loss 0 explicit; ! answers KeepAlive: CUT; ? until KeepAlive: 4; ? calls OpenSession: 1
        ? other_connection KeepAlive ComputeLoss:
    the lease is renewed three times in its time
        connect lease_ms=150; loss 0 explicit; ? until KeepAlive: 3; ? least_gap KeepAlive: 0.04
    a lease without end is not renewed all the time
        ! grant 300000000000; loss 0 explicit; ! sleep 0.3; ? calls KeepAlive: 0
    a lease of no time is not renewed without pause
        ! grant 0; loss 0 explicit; ! sleep 0.3; ? calls KeepAlive: 1-40
    a session that the server has forgotten is opened again and the call repeated
        loss 0 explicit
        ! forget_sessions
        loss 1 explicit -> attempt=1
        ? sessions ComputeLoss: 1 1 2
        ! forget_sessions
        commit 1
        ? sessions CommitMicroBatch: 2 3
        ? open_sessions: 1
    a call opens three sessions in the place of lost ones at most
        ! answers ComputeLoss: SESSION_NOT_FOUND*3; loss 0 explicit -> attempt=3; ? sessions ComputeLoss: 1 2 3 4
        ! answers ComputeLoss: SESSION_NOT_FOUND*4; loss 1 explicit -> SESSION_NOT_FOUND; ? calls OpenSession: 7
    calls that lose a session together open one new one
        loss 0 explicit
        ! hold loss
        start a loss 1 explicit
        start b loss 2 explicit
        start c loss 3 explicit
        ? until ComputeLoss: 4
        ! forget_sessions
        ! release
        end a -> attempt=1
        end b -> attempt=1
        end c -> attempt=1
        ? calls OpenSession: 2
        commit 1
        commit 2
        ? sessions CommitMicroBatch: 2 2
    a call that hears late of a lost session takes the new one
        loss 0 explicit
        ! hold loss 2
        start late loss 2 explicit
        ! wait_until is_held
        ! forget_sessions
        loss 1 explicit -> attempt=1
        ! release
        end late -> attempt=1
        ? calls OpenSession: 2
    a lease that has ended is noticed before the next call
        connect lease_ms=150; loss 0 explicit; ! forget_sessions; ? until KeepAlive: 1; ! sleep 0.3
        loss 1 explicit -> attempt=0
        ? sessions ComputeLoss: 1 2
    a server that grants no session is an error
        connect max_attempts=1; ! answers OpenSession: QUOTA_EXCEEDED; loss 0 explicit -> QUOTA_EXCEEDED; ? calls ComputeLoss: 0
    waiting for a session holds up no other call's retry
        loss 0 explicit
        ! forget_sessions
        ! before OpenSession: sleep 3
        start waiting loss 1 explicit
        ? until OpenSession: 2
        ! answers ComputeLoss: CUT
        loss 2 -> attempt=1
        ? took: 0-2
        ? pending: waiting
        cancel waiting
        end waiting -> CANCELLED
""")
