"""What a client with a replay log does when the server was started again, and what it does not."""

from exchange import replayed

OTHER_RUN = '"another run has taken the head since the server was started again"'

replayed("""
    the open step is repeated in its order and the call goes on
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
        ? calls TakeHead: 1
        ? epoch h: taken-1
        ? recovers: first
        seal expected=0+1+3+9
        ! restart
        apply
        ? accepted: loss 0 4, loss 1 8, commit 1 0.5, discard 2, gradient 9 32, loss 3 20, commit 3 1, seal wait, apply 5
        ? calls TakeHead: 2
        loss 0 value=7
        ! restart open_step=6
        loss 1 value=8
        ? accepted: loss 0 28, loss 1 32
    what a step consists of is repeated before its seal
        loss 0 value=2
        ! hold loss 1
        start late loss 1 value=1
        ! wait_until is_held
        seal expected=0+1
        ! release
        end late
        ! restart
        apply
        ? accepted: loss 0 8, loss 1 4, seal wait, apply 5
    a late discard leaves the next attempt in the log
        loss 2 value=1 explicit
        ! hold discard 2
        start discarded discard 2
        ! wait_until is_held
        loss 2 value=3 attempt=1
        ! release
        end discarded
        ! restart
        apply
        ? accepted: loss 2 12, discard 2, apply 5
    a head that came back at an older step is lost until it is taken
        loss 0 value=1
        ! restart open_step=4
        loss 1 value=2 -> STEP_LOST restored_step=4 checkpoint=newest "checkpoints={'newest': 4}" "no replay: "
        ? calls TakeHead: 0
        ? accepted:
        take
        loss 0 value=1
        ? accepted: loss 0 4
    closed steps are repeated too
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
        ? accepted: loss 0 4, seal wait, apply 5, loss 0 8, discard_gradient 6, loss 0 12, seal wait, apply 7, \
loss 0 16, loss 1 20, loss 2 24, apply 8
    a seal that follows a restart waits for what other trainers repeat
        loss 0; ! restart; seal expected=1; ? accepted: loss 0 4, seal wait
    an apply that follows a restart seals first and waits for what other trainers repeat
        loss 0; ! restart; apply expected=1; ? accepted: loss 0 4, seal wait, apply 5
    the weights that closed a step are uploaded again
        loss 0 value=1
        seal expected=1
        replace value=2
        loss 0 value=3
        ! restart open_step=5
        loss 1 value=1
        ? accepted: loss 0 4, seal wait, replace 5, loss 0 12, loss 1 4
    the log reaches back as far as it is asked to
        connect replay_bytes=1000000 replay_steps=1
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
    without replay a lost step is final
        connect
        loss 0
        ! restart
        loss 1 -> STEP_LOST restored_step=5
        ? calls TakeHead: 0
        weight -> STEP_LOST
        ? calls GetServerInfo: 0-3
        take
        weight
    fencing without a restart is final
        loss 0 value=1
        ! take_by_others
        loss 1 -> EPOCH_FENCED
        seal expected=2 -> EPOCH_FENCED
        weight -> EPOCH_FENCED
        ? epoch h: first
        ? accepted: loss 0 4
    a trainer that comes second joins the one that took the head
        loss 0 value=1
        ! restart
        ! take_by_others recovers=earlier+first
        loss 1 value=2
        ? accepted: loss 0 4, loss 1 8
        ? calls TakeHead: 0
        ? epoch h: others
    a step that cannot be repeated whole stays lost
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
    a step with rows of a joined teacher is lost and the next one is kept
        open teacher head=frozen
        loss 0
        loss 1 joined=key
        loss 2
        ! restart
        loss 3 -> STEP_LOST "no replay: "
        ? calls TakeHead: 0
        ? accepted:
        take
        loss 0 value=1
        ! restart
        loss 1 value=2
        ? accepted: loss 0 4, loss 1 8
    handles on one head recover together
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
        ? calls TakeHead: 1
    a handle that takes the head fences the others
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
    calls that wait for a recovery end by themselves
        loss 0
        ! restart
        ! hold loss 0
        start recovering loss 1
        ! wait_until is_held
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
        ? accepted first: loss 0 4
        ? accepted in_any_order: loss 0 4, loss 1 4, loss 2 4
    cancellation ends a recovery that waits for an answer
        gradient_part 0; ! restart; ! before TakeHead: sleep 3
        start taking loss 1; ? until TakeHead: 1; ! sleep 0.05; ? pending: taking
        cancel taking; end taking -> CANCELLED; ? took: 0-2
    cancellation ends a recovery that waits to repeat
        gradient_part 0; ! restart; ! answers AddGradient: QUEUE_FULL/60000*
        start pausing loss 1; ? until AddGradient: 2; ! sleep 0.05; ? pending: pausing
        cancel pausing; end pausing -> CANCELLED; ? took: 0-2
    calls that lose their step together end by themselves
        loss 0
        ! restart
        ! meet 5
        ! hold loss 0
        start late_seal seal expected=1 timeout_ms=1500
        start late loss 1 timeout_ms=1500
        start late_commit commit 2 timeout_ms=1500
        start cancelled loss 3
        start patient loss 4
        ! wait_until is_held
        cancel cancelled
        end cancelled -> CANCELLED
        end late -> DEADLINE_EXCEEDED
        end late_commit -> DEADLINE_EXCEEDED
        end late_seal -> DEADLINE_EXCEEDED
        ? pending: patient
        ! release
        end patient
        ? accepted once: loss 0 4, loss 4 4
        ? calls TakeHead: 1
    an idle client repeats its part when its session is lost by a restart
        connect replay_bytes=1000000 lease_ms=150
        loss 0 value=1
        ! restart
        ? until_accepted: loss 0 4
        ? until OpenSession: 2
        ? calls TakeHead: 1
        ? epoch h: taken-1
    an idle client opens a session again when the server has forgotten it
        connect replay_bytes=1000000 lease_ms=150
        loss 0 value=1 explicit
        ! forget_sessions
        ? until OpenSession: 2
        ? open_sessions: 1
        ? calls TakeHead: 0
    a call that names no step follows a restart
        loss 0 value=1
        ! restart; weight; ? calls TakeHead: 1; ? accepted: loss 0 4
        ! restart; save one; ? calls TakeHead: 2
        ! restart; step_state; ? calls TakeHead: 3
        ! restart; gradient; ? calls TakeHead: 4
        ! restart; gradient_norm; ? calls TakeHead: 5; ? accepted: loss 0 4
    a head that is gone does not hold up the others
        open other
        loss 0 value=1
        loss 0 value=2 on=other
        ! restart deleted=other
        loss 1 value=2
        ? accepted: loss 0 4, loss 1 8
        loss 1 on=other -> HEAD_NOT_FOUND
    a step that another trainer has closed again counts as repeated
        loss 0 value=1
        discard_gradient
        loss 0 value=2
        ! restart open_step=5
        ! take_by_others recovers=first
        ! answers ComputeLoss: ok
        ! before ComputeLoss: skip_step
        loss 1 value=3
        ? accepted: loss 0 8, loss 1 12
    an open step that cannot be recovered is still found when the server is back
        loss 0 value=1; ! restart; ! answers TakeHead: DRAINING*4; loss 1 value=2; ? accepted: loss 0 4, loss 1 8
    a head that this client has given another state repeats nothing of before
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
    a step whose frozen teacher came back with other weights is lost
        open teacher head=frozen
        loss 0 teacher=teacher
        ! restart
        ! change_weights frozen
        loss 1 -> STEP_LOST "frozen came back with other weights"
        ? accepted:
    a micro-batch of several heads of which one has closed its step is lost
        open other
        loss 0 also=other
        apply on=other
        ! restart open_step=5 other=6
        loss 1 -> STEP_LOST "no replay: "
    a trainable teacher that comes back at the step that was read is trained again
        open other
        loss 0 teacher=other
        loss 0 value=3 on=other
        apply on=other
        ! restart open_step=5 other=5
        loss 1
        ? accepted: loss 0 8, loss 0 12, apply 5, loss 1 4
    a trainable teacher that has moved on is lost
        open other
        loss 0 teacher=other
        loss 0 value=3 on=other
        apply on=other
        ! restart open_step=5 other=6
        loss 1 -> STEP_LOST "no replay: "
        ? accepted:
""")
replayed(f"""
    the log reaches back as far as it has room
        connect replay_bytes=1000
        {"loss 0; apply expected=1; " * 60}loss 0
        ! restart open_step=64; loss 1
        ! restart open_step=5; loss 2 -> STEP_LOST "reaches back to step" "replay_bytes"
    a step that does not fit is lost and the next one is kept
        connect replay_bytes=1000
        {"; ".join(f"loss {i}" for i in range(64))}
        ! restart
        loss 64 -> STEP_LOST "replay_bytes"
        ? calls TakeHead: 0
        take
        loss 0 value=1
        ! restart
        loss 1 value=2
        ? accepted: loss 0 4, loss 1 8
    a trainer whose head another run has taken since the restart is fenced for good
        loss 0 value=1
        ! restart
        ! take_by_others recovers=another
        loss 1 -> EPOCH_FENCED {OTHER_RUN}
        loss 1 -> EPOCH_FENCED {OTHER_RUN}
        seal expected=2 -> EPOCH_FENCED
        ! restart
        loss 1 -> STEP_LOST {OTHER_RUN}
        ? epoch h: first
        ? calls TakeHead: 0
        ? accepted:
        take
        ? recovers:
        loss 2 value=3
        ? epoch h: taken-1
        ! restart
        loss 3 value=4
        ? accepted: loss 2 12, loss 3 16
        ? recovers: taken-1
    a trainer that is overtaken at the take joins its own run
        loss 0 value=1; ! restart; ! before TakeHead: take_by_others recovers=first
        loss 1 value=2; ? accepted: loss 0 4, loss 1 8; ? epoch h: others
    a trainer that is overtaken at the take does not join another run
        loss 0 value=1; ! restart; ! before TakeHead: take_by_others recovers=another
        loss 1 value=2 -> STEP_LOST {OTHER_RUN}; ? accepted: ; ? epoch h: first
    sixteen epochs of earlier restarts are named
        loss 0{"".join(f"; ! restart; loss {i}" for i in range(1, 21))}
        ? recovers: {" ".join(f"taken-{i}" for i in range(4, 20))}
    many calls in flight recover once
        loss 100 value=1
        ! restart
        {"; ".join(f"start l{i} loss {i} value={i}" for i in range(8))}
        {"; ".join(f"end l{i}" for i in range(8))}
        ? calls TakeHead: 1
        ? accepted first: loss 100 4
        ? accepted in_any_order: loss 100 4, {", ".join(f"loss {i} {4 * i}" for i in range(8))}
    a call follows eight restarts
        loss 0{"; ! before SealStep: restart" * 8}; seal expected=1; ? calls TakeHead: 8; ? accepted: loss 0 4, seal wait
    a call does not follow a ninth restart
        loss 0{"; ! before SealStep: restart" * 9}; seal expected=1 -> STEP_LOST; ? calls TakeHead: 8
""")
for call in ("GetHead", "TakeHead"):
    replayed(f"""
        fencing stands though the server went before {call} of a recovery
            loss 0 value=1
            ! restart
            ! before {call}: restart
            loss 1 value=2
            ? accepted: loss 0 4, loss 1 8
            ! take_by_others
            loss 2 -> EPOCH_FENCED "the server has not been started again"
            ? accepted: loss 0 4, loss 1 8
    """)
for taker, others_turn, late_ones_turn, recovers in (
    ("the other", "", "gradient_part 9 on=late-h", "first taken-1"),
    ("that one", "gradient_part 9 on=late-h", "", "first"),
):
    replayed(f"""
        trainers of one run meet though one has missed a restart, and {taker} takes the head
            connect replay_bytes=1000000 lease_ms=0
            connect replay_bytes=1000000 lease_ms=0 client=late
            loss 0 value=1
            gradient_part 8 on=late-h
            ! restart
            loss 1 value=2
            ? epoch h: taken-1
            ! restart
            {others_turn}
            loss 2 value=3
            {late_ones_turn}
            ? calls TakeHead: 2
            ? epoch late-h: taken-2
            ? epoch h: taken-2
            ? accepted in_any_order: loss 0 4, loss 1 8, loss 2 12, gradient 8 8, gradient 9 8
            ? recovers: {recovers}
    """)
for options, other in (("teacher=other", "a teacher"), ("also=other", "another head")):
    replayed(f"""
        a step with {other} that got another state is lost
            open other
            loss 0 {options}
            take on=other
            ! restart
            loss 1 -> STEP_LOST "no replay: "
            ? accepted:
    """)
for end, call, cancel, outcome in (
    ("its cancellation", "loss 2", "cancel ended", "CANCELLED"),
    ("its deadline", "loss 2 timeout_ms=1000", "", "DEADLINE_EXCEEDED"),
    ("the deadline of a blocking call", "seal expected=1 timeout_ms=1000", "", "DEADLINE_EXCEEDED"),
):
    replayed(f"""
        a recovery ends with {end} and another call takes it over
            loss 0 value=1
            loss 1 value=2 explicit
            ! restart
            ! hold loss 1
            start ended {call}
            ! wait_until is_held
            start next loss 3
            {cancel}
            ! wait_until is_abandoned
            end ended -> {outcome}
            ? pending: next
            ! release
            end next
            ? accepted once: loss 0 4, loss 1 8, loss 3 4
            ? calls TakeHead: 1
    """)
