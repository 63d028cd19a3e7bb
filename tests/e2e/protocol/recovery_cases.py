"""What a client with a replay log does when the server was started again, and what it does not."""

from case_table import REPLAY, case

OTHER_RUN = '"another run has taken the head since the server was started again"'

case(
    "the open step is repeated in its order and the call goes on",
    f"""
    {REPLAY}
    loss 0 value=1
    loss 1 value=2 explicit
    loss 2 value=3 explicit
    commit 1 factor=0.5
    discard 2
    gradient_part 9 value=4
    loss 3 value=5 explicit
    ! restart
    commit 3
    ? accepted: loss 0 4, loss 1 8, commit 1 0.5, discard 2, gradient 9 32, loss 3 20, commit 3 1
    ? taken: 1
    ? epoch h: taken-1
    ? recovers: first
    seal expected=0+1+3+9
    ! restart
    apply
    ? accepted: loss 0 4, loss 1 8, commit 1 0.5, discard 2, gradient 9 32, loss 3 20, commit 3 1, seal wait, apply 5
    ? taken: 2
    loss 0 value=7
    ! restart open_step=6
    loss 1 value=8
    ? accepted: loss 0 28, loss 1 32
    """,
)
case(
    "what a step consists of is repeated before its seal",
    f"""
    {REPLAY}
    loss 0 value=2
    ! hold loss 1
    start late loss 1 value=1
    ? held:
    seal expected=0+1
    ! release
    end late
    ! restart
    apply
    ? accepted: loss 0 8, loss 1 4, seal wait, apply 5
    """,
)
case(
    "a late discard leaves the next attempt in the log",
    f"""
    {REPLAY}
    loss 2 value=1 explicit
    ! hold discard 2
    start discarded discard 2
    ? held:
    loss 2 value=3 attempt=1
    ! release
    end discarded
    ! restart
    apply
    ? accepted: loss 2 12, discard 2, apply 5
    """,
)
case(
    "a head that came back at an older step is lost until it is taken",
    f"""
    {REPLAY}
    loss 0 value=1
    ! restart open_step=4
    loss 1 value=2 -> STEP_LOST restored_step=4 checkpoint=newest "checkpoints={{'newest': 4}}" "no replay: "
    ? taken: 0
    ? accepted:
    take
    loss 0 value=1
    ? accepted: loss 0 4
    """,
)
case(
    "closed steps are repeated too",
    f"""
    {REPLAY}
    loss 0 value=1
    apply expected=1
    loss 0 value=2
    discard_gradient
    loss 0 value=3
    seal expected=1
    apply
    loss 0 value=4
    ! restart open_step=5
    loss 1 value=5
    ? accepted: loss 0 4, seal wait, apply 5, loss 0 8, discard_gradient 6, loss 0 12, seal wait, apply 7, loss 0 16, loss 1 20
    ! restart open_step=7
    loss 2 value=6
    ? accepted: loss 0 12, seal wait, apply 7, loss 0 16, loss 1 20, loss 2 24
    ! restart open_step=5
    apply
    ? accepted: loss 0 4, seal wait, apply 5, loss 0 8, discard_gradient 6, loss 0 12, seal wait, apply 7, loss 0 16, loss 1 20, \
loss 2 24, apply 8
    """.replace("\\\n", ""),
)
case(
    "a seal that follows a restart waits for what other trainers repeat",
    f"{REPLAY}\nloss 0\n! restart\nseal expected=1\n? accepted: loss 0 4, seal wait",
)
case(
    "an apply that follows a restart seals first and waits for what other trainers repeat",
    f"{REPLAY}\nloss 0\n! restart\napply expected=1\n? accepted: loss 0 4, seal wait, apply 5",
)
case(
    "the weights that closed a step are uploaded again",
    f"""
    {REPLAY}
    loss 0 value=1
    seal expected=1
    replace value=2
    loss 0 value=3
    ! restart open_step=5
    loss 1 value=1
    ? accepted: loss 0 4, seal wait, replace 5, loss 0 12, loss 1 4
    """,
)
case(
    "the log reaches back as far as it is asked to",
    f"""
    {REPLAY} replay_steps=1
    loss 0
    apply expected=1
    loss 0
    apply expected=1
    loss 0
    ! restart open_step=5
    loss 1 -> STEP_LOST "reaches back to step 6" "replay_steps"
    ! restart open_step=6
    loss 1
    ? accepted: loss 0 4, seal wait, apply 6, loss 0 4, loss 1 4
    """,
)
CLOSED_STEPS = "loss 0\napply expected=1\n" * 60
case(
    "the log reaches back as far as it has room",
    f"connect replay_bytes=1000\n{CLOSED_STEPS}loss 0\n! restart open_step=64\nloss 1\n! restart open_step=5\n"
    'loss 2 -> STEP_LOST "reaches back to step" "replay_bytes"',
)
case(
    "without replay a lost step is final",
    "connect\nloss 0\n! restart\nloss 1 -> STEP_LOST restored_step=5\n? taken: 0\nweight -> STEP_LOST\n? calls GetServerInfo: 0-3\n"
    "take\nweight",
)
case(
    "a step that does not fit is lost and the next one is kept",
    f"""
    connect replay_bytes=1000
    {"".join(f"loss {i}" + chr(10) for i in range(64))}
    ! restart
    loss 64 -> STEP_LOST "replay_bytes"
    ? taken: 0
    take
    loss 0 value=1
    ! restart
    loss 1 value=2
    ? accepted: loss 0 4, loss 1 8
    """,
)
case(
    "fencing without a restart is final",
    f"""
    {REPLAY}
    loss 0 value=1
    ! take_by_others
    loss 1 -> EPOCH_FENCED
    seal expected=2 -> EPOCH_FENCED
    weight -> EPOCH_FENCED
    ? epoch h: first
    ? accepted: loss 0 4
    """,
)
for call in ("GetHead", "TakeHead"):
    case(
        f"fencing stands though the server went before {call} of a recovery",
        f"""
        {REPLAY}
        loss 0 value=1
        ! restart
        ! before {call}: restart
        loss 1 value=2
        ? accepted: loss 0 4, loss 1 8
        ! take_by_others
        loss 2 -> EPOCH_FENCED "the server has not been started again"
        ? accepted: loss 0 4, loss 1 8
        """,
    )
case(
    "a trainer that comes second joins the one that took the head",
    f"""
    {REPLAY}
    loss 0 value=1
    ! restart
    ! take_by_others recovers=earlier+first
    loss 1 value=2
    ? accepted: loss 0 4, loss 1 8
    ? taken: 0
    ? epoch h: others
    """,
)
case(
    "a trainer whose head another run has taken since the restart is fenced for good",
    f"""
    {REPLAY}
    loss 0 value=1
    ! restart
    ! take_by_others recovers=another
    loss 1 -> EPOCH_FENCED {OTHER_RUN}
    loss 1 -> EPOCH_FENCED {OTHER_RUN}
    seal expected=2 -> EPOCH_FENCED
    ! restart
    loss 1 -> STEP_LOST {OTHER_RUN}
    ? epoch h: first
    ? taken: 0
    ? accepted:
    take
    ? recovers:
    loss 2 value=3
    ? epoch h: taken-1
    ! restart
    loss 3 value=4
    ? accepted: loss 2 12, loss 3 16
    ? recovers: taken-1
    """,
)
for recovers, outcome, accepted, epoch in (
    ("first", "", "loss 0 4, loss 1 8", "others"),
    ("another", f"-> STEP_LOST {OTHER_RUN}", "", "first"),
):
    case(
        f"a trainer that is overtaken at the take {'joins its own run' if not outcome else 'does not join another run'}",
        f"{REPLAY}\nloss 0 value=1\n! restart\n! before TakeHead: take_by_others recovers={recovers}\nloss 1 value=2 {outcome}\n"
        f"? accepted: {accepted}\n? epoch h: {epoch}",
    )
for late_one_takes in (False, True):
    taker = "that one" if late_one_takes else "the other"
    case(
        f"trainers of one run meet though one has missed a restart, and {taker} takes the head",
        f"""
        {REPLAY} lease_ms=0
        {REPLAY} lease_ms=0 client=late
        loss 0 value=1
        gradient_part 8 on=late-h
        ! restart
        loss 1 value=2
        ? epoch h: taken-1
        ! restart
        {"gradient_part 9 on=late-h" if late_one_takes else ""}
        loss 2 value=3
        {"" if late_one_takes else "gradient_part 9 on=late-h"}
        ? taken: 2
        ? epoch late-h: taken-2
        ? epoch h: taken-2
        ? accepted in_any_order: loss 0 4, loss 1 8, loss 2 12, gradient 8 8, gradient 9 8
        ? recovers: {"first" if late_one_takes else "first taken-1"}
        """,
    )
MANY_RESTARTS = "".join(f"! restart\nloss {i}\n" for i in range(1, 21))
case(
    "sixteen epochs of earlier restarts are named",
    f"{REPLAY}\nloss 0\n{MANY_RESTARTS}? recovers: {' '.join(f'taken-{i}' for i in range(4, 20))}",
)
case(
    "a step that cannot be repeated whole stays lost",
    f"""
    {REPLAY}
    loss 0 value=1
    loss 1 value=2
    ! restart
    ! refuse loss 1
    loss 2 value=3 -> STEP_LOST "no replay: MICRO_BATCH_CONFLICT"
    loss 2 value=3 -> EPOCH_FENCED "no replay: MICRO_BATCH_CONFLICT"
    ? accepted once: loss 0 4
    ! refuse
    loss 2 value=3
    ? accepted once: loss 0 4, loss 1 8, loss 2 12
    """,
)
for options, other in (("teacher=other", "a teacher"), ("also=other", "another head")):
    case(
        f"a step with {other} that got another state is lost",
        f"""
        {REPLAY}
        open other
        loss 0 {options}
        take on=other
        ! restart
        loss 1 -> STEP_LOST "no replay: "
        ? accepted:
        """,
    )
case(
    "a step with rows of a joined teacher is lost and the next one is kept",
    f"""
    {REPLAY}
    open teacher head=frozen
    loss 0
    loss 1 joined=key
    loss 2
    ! restart
    loss 3 -> STEP_LOST "no replay: "
    ? taken: 0
    ? accepted:
    take
    loss 0 value=1
    ! restart
    loss 1 value=2
    ? accepted: loss 0 4, loss 1 8
    """,
)
case(
    "handles on one head recover together",
    f"""
    {REPLAY}
    loss 0 value=1
    open gone head=h
    gradient_part 1 on=gone value=2
    drop gone
    open other head=h
    seal on=other expected=2
    ! restart
    apply
    ? accepted: loss 0 4, gradient 1 16, seal wait, apply 5
    ? epoch other: taken-1
    ? epoch h: taken-1
    discard_gradient on=other step=6
    loss 0 value=3 step=7
    ? taken: 1
    """,
)
case(
    "a handle that takes the head fences the others",
    f"""
    {REPLAY}
    open other head=h
    loss 0 value=1
    take on=other
    ? epoch h: first
    ? epoch other: taken-1
    loss 1 -> EPOCH_FENCED
    open opened head=h
    gradient_part 1 on=other value=2
    ! restart
    loss 2 -> STEP_LOST
    apply on=opened
    ? accepted: gradient 1 16, apply 5
    ? epoch opened: taken-2
    ? epoch other: taken-2
    """,
)
case(
    "many calls in flight recover once",
    f"""
    {REPLAY}
    loss 100 value=1
    ! restart
    {"".join(f"start l{i} loss {i} value={i}" + chr(10) for i in range(8))}
    {"".join(f"end l{i}" + chr(10) for i in range(8))}
    ? taken: 1
    ? accepted_first: loss 100 4
    ? accepted in_any_order: loss 100 4, {", ".join(f"loss {i} {4 * i}" for i in range(8))}
    """,
)
case(
    "calls that wait for a recovery end by themselves",
    f"""
    {REPLAY}
    loss 0
    ! restart
    ! hold loss 0
    start recovering loss 1
    ? held:
    start patient loss 2
    start late loss 3 timeout_ms=1000
    start late_commit commit 4 timeout_ms=1000
    start cancelled loss 5 explicit
    ! sleep 0.05
    ? pending: cancelled
    cancel cancelled
    end cancelled -> CANCELLED
    seal expected=1 timeout_ms=50 -> DEADLINE_EXCEEDED
    end late -> DEADLINE_EXCEEDED
    end late_commit -> DEADLINE_EXCEEDED
    ? pending: patient
    ? pending: recovering
    ! release
    end recovering
    end patient
    ? accepted_first: loss 0 4
    ? accepted in_any_order: loss 0 4, loss 1 4, loss 2 4
    """,
)
for end, options, outcome in (
    ("its cancellation", "loss 2", "CANCELLED"),
    ("its deadline", "loss 2 timeout_ms=1000", "DEADLINE_EXCEEDED"),
    ("the deadline of a blocking call", "seal expected=1 timeout_ms=1000", "DEADLINE_EXCEEDED"),
):
    case(
        f"a recovery ends with {end} and another call takes it over",
        f"""
        {REPLAY}
        loss 0 value=1
        loss 1 value=2 explicit
        ! restart
        ! hold loss 1
        start ended {options}
        ? held:
        start next loss 3
        {"cancel ended" if outcome == "CANCELLED" else ""}
        ? abandoned:
        end ended -> {outcome}
        ? pending: next
        ! release
        end next
        ? accepted once: loss 0 4, loss 1 8, loss 3 4
        ? taken: 1
        """,
    )
case(
    "cancellation ends a recovery that waits for an answer",
    f"{REPLAY}\ngradient_part 0\n! restart\n! before TakeHead: sleep 3\nstart taking loss 1\n? until TakeHead: 1\n"
    "! sleep 0.05\n? pending: taking\ncancel taking\nend taking -> CANCELLED\n? took: 0-2",
)
case(
    "cancellation ends a recovery that waits to repeat",
    f"{REPLAY}\ngradient_part 0\n! restart\n! answers AddGradient: QUEUE_FULL/60000*\nstart pausing loss 1\n"
    "? until AddGradient: 2\n! sleep 0.05\n? pending: pausing\ncancel pausing\nend pausing -> CANCELLED\n? took: 0-2",
)
case(
    "calls that lose their step together end by themselves",
    f"""
    {REPLAY}
    loss 0
    ! restart
    ! meet 5
    ! hold loss 0
    start late_seal seal expected=1 timeout_ms=1500
    start late loss 1 timeout_ms=1500
    start late_commit commit 2 timeout_ms=1500
    start cancelled loss 3
    start patient loss 4
    ? held:
    cancel cancelled
    end cancelled -> CANCELLED
    end late -> DEADLINE_EXCEEDED
    end late_commit -> DEADLINE_EXCEEDED
    end late_seal -> DEADLINE_EXCEEDED
    ? pending: patient
    ! release
    end patient
    ? accepted once: loss 0 4, loss 4 4
    ? taken: 1
    """,
)
RESTARTS = "! before SealStep: restart\n"
case(
    "a call follows eight restarts",
    f"{REPLAY}\nloss 0\n{RESTARTS * 8}seal expected=1\n? taken: 8\n? accepted: loss 0 4, seal wait",
)
case(
    "a call does not follow a ninth restart",
    f"{REPLAY}\nloss 0\n{RESTARTS * 9}seal expected=1 -> STEP_LOST\n? taken: 8",
)
case(
    "an idle client repeats its part when its session is lost by a restart",
    f"{REPLAY} lease_ms=150\nloss 0 value=1\n! restart\n"
    "? until_accepted: loss 0 4\n? until OpenSession: 2\n? taken: 1\n? epoch h: taken-1",
)
case(
    "an idle client opens a session again when the server has forgotten it",
    f"{REPLAY} lease_ms=150\nloss 0 value=1 explicit\n! forget_sessions\n? until OpenSession: 2\n? open_sessions: 1\n? taken: 0",
)
case(
    "a call that names no step follows a restart",
    f"{REPLAY}\nloss 0 value=1\n! restart\nweight\n? taken: 1\n? accepted: loss 0 4\n! restart\nsave one\n? taken: 2\n"
    "! restart\nstep_state\n? taken: 3\n! restart\ngradient\n? taken: 4\n"
    "! restart\ngradient_norm\n? taken: 5\n? accepted: loss 0 4",
)
case(
    "a head that is gone does not hold up the others",
    f"""
    {REPLAY}
    open other
    loss 0 value=1
    loss 0 value=2 on=other
    ! restart deleted=other
    loss 1 value=2
    ? accepted: loss 0 4, loss 1 8
    loss 1 on=other -> HEAD_NOT_FOUND
    """,
)
case(
    "a step that another trainer has closed again counts as repeated",
    f"""
    {REPLAY}
    loss 0 value=1
    discard_gradient
    loss 0 value=2
    ! restart open_step=5
    ! take_by_others recovers=first
    ! answers ComputeLoss: ok
    ! before ComputeLoss: skip_step
    loss 1 value=3
    ? accepted: loss 0 8, loss 1 12
    """,
)
case(
    "an open step that cannot be recovered is still found when the server is back",
    f"{REPLAY}\nloss 0 value=1\n! restart\n! answers TakeHead: DRAINING*4\nloss 1 value=2\n? accepted: loss 0 4, loss 1 8",
)
case(
    "a head that this client has given another state repeats nothing of before",
    f"""
    {REPLAY}
    loss 0 value=1
    restore one
    loss 1 value=2
    upload
    loss 2 value=3
    load model.safetensors
    loss 3 value=4
    ! restart
    loss 4 value=5
    ? accepted: loss 3 16, loss 4 20
    """,
)
case(
    "a step whose frozen teacher came back with other weights is lost",
    f"""
    {REPLAY}
    open teacher head=frozen
    loss 0 teacher=teacher
    ! restart
    ! change_weights frozen
    loss 1 -> STEP_LOST "frozen came back with other weights"
    ? accepted:
    """,
)
for other_step, outcome, accepted in ((5, "", "loss 0 8, loss 0 12, apply 5, loss 1 4"), (6, '-> STEP_LOST "no replay: "', "")):
    what = "has moved on is lost" if outcome else "comes back at the step that was read is trained again"
    case(
        f"a trainable teacher that {what}",
        f"""
        {REPLAY}
        open other
        loss 0 teacher=other
        loss 0 value=3 on=other
        apply on=other
        ! restart open_step=5 other={other_step}
        loss 1 {outcome}
        ? accepted: {accepted}
        """,
    )
case(
    "a micro-batch of several heads of which one has closed its step is lost",
    f'{REPLAY}\nopen other\nloss 0 also=other\napply on=other\n! restart open_step=5 other=6\nloss 1 -> STEP_LOST "no replay: "',
)
