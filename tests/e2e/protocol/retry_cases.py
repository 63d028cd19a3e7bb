"""What a client makes again: when, under which attempt, in which session."""

from case_table import REPLAY, case

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
    connect_once = "connect max_attempts=1\n! clear"
    connect = "connect max_attempts=4\n! clear"
    case(
        f"{method} is made once without retries",
        f"{connect_once}\n! answers {method}: CUT*\n{call} -> UNAVAILABLE\n? calls {method}: 1",
    )
    case(
        f"{method} is retried when it was cut or refused for want of room",
        f"{connect}\n! answers {method}: CUT DRAINING QUEUE_FULL\n{call}\n? calls {method}: 4\n? same {method}:",
    )
    case(
        f"{method} is retried when the server cut it off",
        f"{connect}\n! answers {method}: CANCELLED\n{call}\n? calls {method}: 2",
    )
    case(
        f"{method} is tried as often as the policy says",
        f"{connect}\n! answers {method}: CUT*\n{call} -> UNAVAILABLE\n? calls {method}: 4",
    )
    case(
        f"{method} waits for a server that is away when there is a replay log",
        f"{REPLAY} max_attempts=1\n! clear\n! answers {method}: CUT*5 DRAINING*3 STARTING*2\n{call}\n? calls {method}: 11",
    )
    case(
        f"{method} waits for a server that restarts when there is a replay log",
        f"{REPLAY}\n! clear\n! answers {method}: ENGINE_FAILED!*6\n{call}\n? calls {method}: 7",
    )
for title, (name, call) in UNREPEATABLE.items():
    case(
        f"{title} is retried only if nothing was done",
        f"connect\n! clear\n! answers {name}: CUT\n{call} -> UNAVAILABLE\n? calls {name}: 1\n"
        f"! answers {name}: DRAINING\n{call}\n? calls {name}: 3",
    )
    case(
        f"{title} is not repeated when the server cut it off",
        f"connect\n! clear\n! answers {name}: CANCELLED\n{call} -> UNAVAILABLE\n? calls {name}: 1",
    )
    case(
        f"{title} does not wait for a server that is away",
        f"{REPLAY}\n! clear\n! answers {name}: CUT\n{call} -> UNAVAILABLE\n? calls {name}: 1",
    )
    case(
        f"{title} does not wait for a server that restarts",
        f"{REPLAY}\n! clear\n! answers {name}: ENGINE_FAILED!\n{call} -> ENGINE_FAILED\n? calls {name}: 1",
    )
case(
    "attaching is retried only if nothing was done",
    "connect\n! answers CreateHead: CUT\nattach new -> UNAVAILABLE\n? calls CreateHead: 1\n"
    "! answers CreateHead: DRAINING\nattach new\n? calls CreateHead: 3",
)
for reason in (*REFUSALS_FOR_WANT_OF_ROOM, "STRIPE_LOST", "TRANSFER_NOT_FOUND", "REGION_NOT_FOUND"):
    case(
        f"{reason.partition('/')[0]} is retried",
        f"connect\n! answers ComputeLoss: {reason}\nloss 0\n? attempts ComputeLoss: 0 1",
    )
for reason in FINAL:
    case(
        f"{reason} is final",
        f"connect\n! answers ComputeLoss: {reason}\nloss 0 -> {reason}\n? calls ComputeLoss: 1\n"
        f"! answers CommitMicroBatch: {reason}\ncommit 0 -> {reason}\n? calls CommitMicroBatch: 1\n"
        f"! answers SealStep: {reason}\nseal expected=1 -> {reason}\n? calls SealStep: 1",
    )
case(
    "MICRO_BATCH_IN_PROGRESS is retried when the own earlier attempt holds the micro-batch",
    "connect\n! answers ComputeLoss: CUT MICRO_BATCH_IN_PROGRESS\nloss 0\n? attempts ComputeLoss: 0 1 2",
)
case(
    "a staging slot of the own session is not waited for",
    "connect\n! answers ComputeLoss: STAGING_FULL\nloss 0 explicit -> STAGING_FULL\n? calls ComputeLoss: 1",
)
case(
    "without a replay log a server that restarts is final",
    "connect\n! answers SealStep: STEP_LOST!\nseal expected=1 -> STEP_LOST\n? calls SealStep: 1",
)

# ---- uploads ------------------------------------------------------------------------------------------------------------

case(
    "an upload that was refused before its last byte is sent again",
    "connect\n! answers UploadWeights: CUT DRAINING\nupload\n? calls UploadWeights: 3",
)
case(
    "weights set outside of a step are not sent again after the last byte",
    "connect\n! cut_upload 128\nupload -> UNAVAILABLE\n? calls UploadWeights: 1",
)
case(
    "weights that close a step are sent again after the last byte",
    "connect\nseal expected=1\n! cut_upload 128\nreplace\n? calls UploadWeights: 2\n? same UploadWeights:",
)

# ---- how long is waited -------------------------------------------------------------------------------------------------

case(
    "the back-off doubles to its bound",
    "connect max_attempts=5 backoff_ms=40 max_backoff_ms=100\n! answers CommitMicroBatch: CUT*\ncommit 0 -> UNAVAILABLE\n"
    "? gaps CommitMicroBatch: 0.02 0.04 0.05 0.05\n? took: 0-2",
)
case(
    "the delay that the server asks for is kept",
    "connect\n! answers SealStep: QUEUE_FULL/150*\nseal expected=1 -> QUEUE_FULL\n? gaps SealStep: 0.15 0.15",
)
case(
    "a wait that would outlast the call is not begun",
    "connect\n! answers SealStep: QUEUE_FULL/60000\nseal expected=1 timeout_ms=2000 -> QUEUE_FULL\n"
    "? took: 0-1.5\n? calls SealStep: 1\n"
    "! answers CommitMicroBatch: QUEUE_FULL/60000\ncommit 0 timeout_ms=2000 -> QUEUE_FULL\n"
    "? took: 0-1.5\n? calls CommitMicroBatch: 1",
)
case(
    "all attempts together keep to the timeout",
    "connect max_attempts=1000 backoff_ms=50\n! answers ComputeLoss: CUT*\nloss 0 timeout_ms=500 -> UNAVAILABLE|DEADLINE_EXCEEDED\n"
    "? took: 0.2-2\n? calls ComputeLoss: 2-25",
)
case(
    "an absent server is waited for until shortly before the deadline",
    f"{REPLAY} max_attempts=1 backoff_ms=400 max_backoff_ms=60000\n! answers SealStep: CUT*\n"
    "seal expected=1 timeout_ms=4000 -> UNAVAILABLE\n? took: 2.8-4.5\n? calls SealStep: 4-9\n"
    "! answers ComputeLoss: CUT*\nloss 0 timeout_ms=4000 -> UNAVAILABLE\n? took: 2.8-4.5\n? calls ComputeLoss: 4-9",
)
case(
    "an absent server that asks for a delay is not asked sooner",
    f"{REPLAY}\n! answers SealStep: STARTING/1400\nseal expected=1\n? took: 1.4-3\n"
    "! answers SealStep: STARTING/30000\nseal expected=1 timeout_ms=5000 -> STARTING\n? took: 0-4",
)
case(
    "with a replay log a server that answers is tried as often as without",
    f"{REPLAY}\n! answers SealStep: SHARD_NOT_READY*\nseal expected=1 -> SHARD_NOT_READY\n? calls SealStep: 3",
)
case(
    "waiting for an absent server uses up no attempts",
    f"{REPLAY}\n! answers ComputeLoss: CUT*6 STAGING_FULL/1*\nloss 0 explicit -> STAGING_FULL\n? calls ComputeLoss: 9",
)
case(
    "cancellation ends the wait for the next attempt",
    "connect backoff_ms=60000\n! answers CommitMicroBatch: CUT*\nstart c commit 0\n? until CommitMicroBatch: 1\n! sleep 0.05\n"
    "? pending: c\ncancel c\nend c -> CANCELLED\n? took: 0-5\n"
    "! answers ComputeLoss: CUT*\nstart l loss 0\n? until ComputeLoss: 1\n! sleep 0.05\ncancel l\nend l -> CANCELLED\n? took: 0-5",
)

# ---- attempts -----------------------------------------------------------------------------------------------------------

case(
    "a decision names the attempt that was submitted last",
    """
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
    """,
)
case(
    "what follows a failed loss names no earlier attempt",
    """
    connect
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
    """,
)
case(
    "a named attempt is not below those that retries have come to from it",
    """
    connect
    ! answers ComputeLoss: STAGING_FULL/1*3
    loss 5 explicit attempt=2 -> STAGING_FULL
    loss 5 explicit attempt=2 -> attempt=4
    ? attempts ComputeLoss: 2 3 4 4
    """,
)
case(
    "a named attempt that the caller itself has gone beyond is sent as it is",
    "connect\n" + "".join(f"loss 5 explicit attempt={attempt} -> attempt={attempt}\n" for attempt in (7, 4, 7)),
)
case(
    "what adds nothing has no attempt",
    "connect\n! answers ComputeLoss: CUT\nforward -> attempt=0\n? attempts ComputeLoss: 0 0",
)

# ---- sessions -----------------------------------------------------------------------------------------------------------

case(
    "the first explicit micro-batch opens the session and closing the client ends it",
    """
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
    """,
)
case(
    "without a lease there is no session",
    "connect lease_ms=0\nloss 0 explicit\ncommit 0\n"
    "? sessions ComputeLoss: -\n? sessions CommitMicroBatch: -\n? calls OpenSession: 0",
)
case(
    "the lease is renewed on a connection of its own",
    "connect lease_ms=150\nloss 0 explicit\n! answers KeepAlive: CUT\n? until KeepAlive: 4\n? calls OpenSession: 1\n"
    "? other_connection KeepAlive ComputeLoss:",
)
case(
    "the lease is renewed three times in its time",
    "connect lease_ms=150\nloss 0 explicit\n? until KeepAlive: 3\n? least_gap KeepAlive: 0.04",
)
case(
    "a lease without end is not renewed all the time",
    "connect\n! grant 300000000000\nloss 0 explicit\n! sleep 0.3\n? calls KeepAlive: 0",
)
case(
    "a lease of no time is not renewed without pause",
    "connect\n! grant 0\nloss 0 explicit\n! sleep 0.3\n? calls KeepAlive: 1-40",
)
case(
    "a session that the server has forgotten is opened again and the call repeated",
    """
    connect
    loss 0 explicit
    ! forget_sessions
    loss 1 explicit -> attempt=1
    ? sessions ComputeLoss: 1 1 2
    ! forget_sessions
    commit 1
    ? sessions CommitMicroBatch: 2 3
    ? open_sessions: 1
    """,
)
case(
    "a call opens three sessions in the place of lost ones at most",
    "connect\n! answers ComputeLoss: SESSION_NOT_FOUND*3\nloss 0 explicit -> attempt=3\n? sessions ComputeLoss: 1 2 3 4\n"
    "! answers ComputeLoss: SESSION_NOT_FOUND*4\nloss 1 explicit -> SESSION_NOT_FOUND\n? calls OpenSession: 7",
)
case(
    "calls that lose a session together open one new one",
    """
    connect
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
    """,
)
case(
    "a call that hears late of a lost session takes the new one",
    """
    connect
    loss 0 explicit
    ! hold loss 2
    start late loss 2 explicit
    ? held:
    ! forget_sessions
    loss 1 explicit -> attempt=1
    ! release
    end late -> attempt=1
    ? calls OpenSession: 2
    """,
)
case(
    "a lease that has ended is noticed before the next call",
    "connect lease_ms=150\nloss 0 explicit\n! forget_sessions\n? until KeepAlive: 1\n! sleep 0.3\nloss 1 explicit -> attempt=0\n"
    "? sessions ComputeLoss: 1 2",
)
case(
    "a server that grants no session is an error",
    "connect max_attempts=1\n! answers OpenSession: QUOTA_EXCEEDED\nloss 0 explicit -> QUOTA_EXCEEDED\n? calls ComputeLoss: 0",
)
case(
    "waiting for a session holds up no other call's retry",
    """
    connect
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
    """,
)
