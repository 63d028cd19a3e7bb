"""The transport's benchmark runs, tiny, on the CPU: every case is right, and has its figures."""

PATHS = ("grpc", "shared_memory")
CASES = (
    *("grpc", "grpc_two_in_flight", "grpc_two_in_flight_tau_2_8", "grpc_frozen_head", "grpc_many_clients"),
    *("shared_memory", "shared_memory_own_rows", "shared_memory_tau_2_8"),
    *(f"{path}_{case}" for path in PATHS for case in ("explicit", "held", "python", "replay")),
)


def test_every_case_is_timed_against_its_base(smoke_run):
    values = smoke_run("transport")
    assert {case for case in values if case.endswith("_ratio")} == {f"cpu_transport_{case}_ratio" for case in CASES}
    assert all(value > 0 for case, value in values.items() if case.endswith(("_ratio", "_ms")) and "_server_" not in case)
