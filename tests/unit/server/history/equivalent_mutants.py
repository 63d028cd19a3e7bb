"""Mutants of server/heads that are no faults: file (or *), a pattern that finds their descriptions, and why no caller can tell.

A line serves as long as its pattern fits what schemata.py calls the change.
"""

EQUIVALENT = [
    ("*", r"AssertHeld", "for the compiler's analysis of threads"),
    (
        "*",
        r"^(false -> true|0 -> 1) in (was_loading|waits|is_first|runs|version) = (false|0)$",
        "the turn that follows sets it before it is read",
    ),
    ("*", r"^(< -> <=|>= -> >) in .*MonotonicNow", "a deadline is passed a nanosecond earlier or later"),
    ("waiting.cc", r"^> -> >= in .*absl :: ZeroDuration", "a deadline is passed a nanosecond earlier or later"),
    (
        "*",
        r"^left out: (scheduler :: )?Turn :: Free \( std :: move \(",
        "the memory is freed at the end of its statement or block, in the turn",
    ),
    ("*", r"^left out: .* \. reserve \(", "capacity alone"),
    ("weight_tensors.cc", r"^< -> <= in start < total$", "one piece more, which has no elements"),
    ("head.cc", r"^> -> >= in .*key \. step > 0", "the step before step 0 is never open"),
    ("head.cc", r"^left out: state_cause \. clear", "told in the one state alone that sets it anew"),
    ("head_registry.cc", r"^left out: return 0$", "the plan is asked for, and no limit looks at it"),
    ("head_name.cc", r"MaxSplits", "a name of one part more is refused anyway"),
    ("head_steps.cc", r"^left out: admission \. Release", "the head is free a moment later, when the call returns"),
    ("head_registry.cc", r"^0 -> 1 in 0$", "without a limit nothing is planned for"),
    ("head_registry.cc", r"^> -> >= in limits_ \. max_tenant_memory_bytes > 0", "without a limit nothing is planned for"),
]
