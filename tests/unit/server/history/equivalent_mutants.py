"""Mutants of server/heads that are no faults: file (or *), a pattern that finds their descriptions, and why no caller can tell.

A line serves as long as its pattern fits what schemata.py calls the change.
"""

EQUIVALENT = [
    ("*", r"^left out: .* \. reserve \(", "capacity alone"),
    ("weight_tensors.cc", r"^< -> <= in start < total$", "one piece more, which has no elements"),
    ("head.cc", r"^> -> >= in .*key \. step > 0", "the step before step 0 is never open"),
    ("head.cc", r"^left out: state_cause \. clear", "told in the one state alone that sets it anew"),
    ("head_registry.cc", r"^left out: return 0$", "the plan is asked for, and no limit looks at it"),
    ("head_registry.cc", r"^> -> >= in limits_ \. max_tenant_memory_bytes > 0", "without a limit nothing is planned for"),
]
