"""Checks that every #include and import obeys the layers of the design; takes seconds and needs nothing but Python.

Each file belongs to the layer of the longest matching folder in LAYERS, and each include to one of the kinds below. A layer names
the kinds that it may include; everything else is an error.
"""

import re
import sys
from pathlib import Path

import check_imports
from lint import ROOT, finish

# The kind of an include is that of the first pattern that matches its path; one that matches none is an error anywhere.
KINDS = [
    ("cuda", r"cuda\w*\.(h|hpp)|cu(blas|sparse|rand|dnn|solver)\w*\.h|curand_kernel\.h|nv\w*\.h|driver_types\.h|vector_types\.h"),
    ("cuda", r"(cuda|cub|thrust|cute|cutlass|nvtx3|cooperative_groups)(/.*|\.h)|(kernels/cuda/|server/cuda/).*|.*\.cuh"),
    ("nccl", r"nccl\w*\.h"),
    ("grpc", r"(grpc|grpcpp)/.*"),
    ("protobuf", r"google/(protobuf|rpc)/.*"),
    ("generated", r"(proto/)?headwater/v1/.*|.*\.pb\.h"),  # and what stands beside it for all
    ("absl_types", r"absl/(status|types)/.*"),
    ("absl", r"absl/.*"),
    ("machine", r"headwater/kernels/(machine_limits|return_if_error|types)\.h"),  # what the client takes from there
    ("kernels_api", r"headwater/kernels/.*"),
    ("client_core_api", r"headwater/client/(c_api|error|future|options|tensor)\.h"),
    ("client_api", r"headwater/client/.*"),
    ("kernels_reference", r"kernels/reference/.*"),
    ("kernels_lab", r"kernels/lab/.*"),
    ("kernels_inner", r"kernels/.*"),
    ("model_files", r"server/model_files/.*"),
    ("flag_types", r"server/flags/.*"),
    ("server_observability", r"server/observability/.*"),
    ("server_waits", r"server/scheduler/waiting\.h"),
    ("server_heads", r"server/(heads|scheduler|checkpoint)/.*"),
    ("server_transport", r"server/transport/.*"),
    ("server_guard", r"server/guard/.*"),
    ("server_service", r"server/.*"),
    ("client_core", r"client/core/.*"),
    ("client_inner", r"client/.*"),
    ("tests", r"tests/.*"),
    ("test_library", r"(gtest|gmock|benchmark|sanitizer)/.*"),
    ("blas", r"cblas\.h|openblas_config\.h"),
    ("formats", r"nlohmann/.*|xxhash\.h|zlib\.h"),
    ("logs_and_metrics", r"prometheus/.*|microhttpd\.h"),
    ("tls", r"openssl/.*"),
    ("std", r"\w+|(std\w+|string|limits|float|math|errno|ctype|assert|signal|time|locale|setjmp|wchar|inttypes|fenv)\.h"),
    ("std", r"\w+intrin\.h"),
    (
        "posix",
        r"(sys|linux|netinet|arpa|net)/\w+\.h|(unistd|fcntl|dirent|dlfcn|malloc|pthread|sched|poll|netdb|pwd|getopt|syscall|"
        r"semaphore|execinfo|libgen|glob|grp|ifaddrs|spawn|ftw|link)\.h",
    ),
    ("beside", r"\w+\.h"),  # a file of the same folder; the product names its headers by their full path
]

PLAIN = {"std", "absl_types"}
PRODUCT = PLAIN | {"absl", "posix", "machine", "kernels_api", "formats"}
KERNELS = PRODUCT | {"kernels_inner", "blas"}
SERVER_STATE = PRODUCT | {"server_heads", "server_waits", "server_observability", "model_files"}
SERVER = SERVER_STATE | {
    "flag_types",
    "server_transport",
    "server_guard",
    "server_service",
    "logs_and_metrics",
    "grpc",
    "protobuf",
    "generated",
    "tls",
}
# Device code is C++17 (nvcc 13 with gcc 12 crashes on C++20's <functional>), so it is kept away from the interface's headers and
# from Abseil; what it shares with the host code is plain.
DEVICE_CODE = {"std", "cuda", "kernels_inner"}
# Messages in, messages out: it knows no typed API.
CORE = PLAIN | {"absl", "posix", "machine", "formats", "client_core_api", "client_core", "grpc", "protobuf", "generated", "tls"}
CLIENT = PLAIN | {"absl", "flag_types", "posix", "machine", "formats", "client_core_api", "client_api", "client_inner"}
TESTS = SERVER | KERNELS | CLIENT | {"client_core", "tests", "test_library", "kernels_reference", "beside"}

# Folder: the kinds that files in it may include.
LAYERS = {
    "proto": PLAIN | {"protobuf", "generated", "kernels_api", "machine"},
    "kernels/include": PLAIN | {"kernels_api", "machine"},
    "kernels": KERNELS,
    "kernels/reference": KERNELS | {"kernels_reference"},
    "kernels/comm": KERNELS | {"cuda", "nccl", "tls"},
    "kernels/cuda": KERNELS | {"cuda"},
    "kernels/lab": KERNELS | {"cuda", "kernels_lab", "kernels_reference"},
    "server": SERVER,
    "server/flags": PLAIN | {"absl"},  # the command line's, too
    "server/group": SERVER | {"kernels_inner"},
    "server/heads": SERVER_STATE,
    "server/scheduler": SERVER_STATE,
    "server/checkpoint": SERVER_STATE,
    "server/model_files": PRODUCT | {"model_files"},  # read by the command line, too
    "server/transport": PRODUCT | {"server_transport", "server_waits", "server_observability"},
    "server/guard": PRODUCT | {"server_guard", "server_transport", "server_heads", "server_observability", "grpc"},
    "server/observability": PRODUCT | {"server_observability", "logs_and_metrics"},
    "client": CLIENT | {"client_core", "grpc", "protobuf", "generated", "tls"},
    "client/core": CORE,
    "client/core/include": PLAIN | {"absl", "client_core_api"},
    "client/ctl": CLIENT | {"client_core", "model_files", "grpc"},
    "client/cpp/include": PLAIN | {"absl", "client_core_api", "client_api"},
    "tests": TESTS,
    "tests/kernels": KERNELS | {"tests", "test_library", "kernels_reference", "beside", "cuda"},
    "tests/kernels/nccl": {"std", "cuda", "nccl"},  # in place of NCCL
    "tests/unit/kernels": TESTS | {"cuda"},
    "tests/fuzz": TESTS | {"cuda"},
    "tests/bench": TESTS | {"cuda"},
}

SOURCE_SUFFIXES = {".h", ".hpp", ".cc", ".cpp", ".c", ".cu", ".cuh"}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:<([^>]+)>|"([^"]+)")', re.MULTILINE)
# The Python client is under the same rule: it knows the wire API and the C ABI, nothing of the server.
PYTHON_SERVER_PATH = re.compile(r"^\s*(?:from|import)\s+server\b", re.MULTILINE)


def kind_of(include: str) -> str | None:
    """The kind of an include path, or None if no pattern knows it."""
    return next((kind for kind, pattern in KINDS if re.fullmatch(pattern, include)), None)


def layer_of(path: str) -> str | None:
    """The longest folder of LAYERS that holds the file, or None."""
    return max((folder for folder in LAYERS if path.startswith(folder + "/")), key=len, default=None)


def check_file(path: str, text: str) -> list[str]:
    """The errors of one file; `path` is relative to the root, with forward slashes."""
    if path.endswith(".py"):
        return [f"{path}: the client must not import the server"] if PYTHON_SERVER_PATH.search(text) else []
    layer = layer_of(path)
    if layer is None:
        return [f"{path}: no layer is defined for this folder; add it to tests/lint/check_layers.py"]
    allowed = DEVICE_CODE if layer == "kernels/cuda" and path.endswith((".cu", ".cuh")) else LAYERS[layer]
    errors = []
    for match in INCLUDE.finditer(text):
        include = match.group(1) or match.group(2)
        line = text.count("\n", 0, match.start()) + 1
        kind = kind_of(include)
        if kind is None:
            errors.append(f"{path}:{line}: includes {include}, which is neither a full path of this project nor a known library's")
        elif kind not in allowed:
            errors.append(f"{path}:{line}: {layer} includes {include} ({kind}); it may include {', '.join(sorted(allowed))}")
    return errors


def check_tree(root: Path) -> tuple[int, list[str]]:
    """The number of files checked under `root`, and all errors."""
    count, errors = 0, []
    for top in sorted({folder.split("/")[0] for folder in LAYERS}):
        for file in sorted((root / top).rglob("*")):
            path = file.relative_to(root).as_posix()
            is_client_python = file.suffix == ".py" and path.startswith("client/python/")
            if file.is_file() and (file.suffix in SOURCE_SUFFIXES or is_client_python):
                count += 1
                errors += check_file(path, file.read_text(encoding="utf-8"))
    return count, errors


def main() -> int:
    count, errors = check_tree(ROOT)
    errors += check_imports.check_package(ROOT / check_imports.FOLDER)
    if count == 0:
        errors.append(f"{ROOT}: no source file found")
    return finish("layers", f"{count} files", errors)


if __name__ == "__main__":
    sys.exit(main())
