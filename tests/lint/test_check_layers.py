"""An include is judged by its kind and by the longest folder of the table that holds its file."""

import pytest

import check_layers


@pytest.mark.parametrize(
    ("path", "include", "errors"),
    [
        ("kernels/include/headwater/kernels/engine.h", '"absl/status/statusor.h"', 0),
        ("kernels/include/headwater/kernels/engine.h", '"absl/strings/str_cat.h"', 1),
        ("kernels/cpu/cpu_engine.cc", "<cblas.h>", 0),
        ("kernels/cpu/cpu_engine.cc", "<cublas_v2.h>", 1),
        ("kernels/cuda/engine.cu", '"headwater/kernels/engine.h"', 1),  # device code
        ("kernels/cuda/engine_core.h", '"absl/functional/function_ref.h"', 0),
        ("kernels/comm/nccl_communicator.cc", "<nccl.h>", 0),
        ("server/heads/head.cc", '"server/observability/metrics.h"', 0),
        ("server/heads/head.cc", '"server/service/services.h"', 1),
        ("server/heads/head.cc", '"head.h"', 1),
        ("client/cpp/src/client.cc", '"client/core/core.h"', 0),
        ("client/cpp/src/client.cc", '"server/heads/head.h"', 1),
        ("client/ctl/command_load.cc", '"server/model_files/head_tensors.h"', 0),
        ("tests/unit/head_test.cc", '"kernels/lab/experiment.h"', 1),
        ("server/heads/head.cc", "<unknown/library.h>", 1),
        ("elsewhere/a.cc", "<vector>", 1),
    ],
)
def test_includes_keep_to_the_layers(path, include, errors):
    assert len(check_layers.check_file(path, f"  #  include {include}\n")) == errors


def test_the_python_client_does_not_import_the_server():
    assert check_layers.check_file("client/python/headwater/x.py", "from server.heads import Head\n")
    assert not check_layers.check_file("client/python/headwater/x.py", "from headwater import Head\n")


def test_a_wrong_include_in_a_tree_is_found(tmp_path):
    (tmp_path / "server" / "heads").mkdir(parents=True)
    (tmp_path / "server" / "heads" / "head.cc").write_text("#include <vector>\n#include <nccl.h>\n")
    count, (error,) = check_layers.check_tree(tmp_path)
    assert count == 1 and error.startswith("server/heads/head.cc:2:")
