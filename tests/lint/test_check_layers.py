"""Every line of the table of layers catches what it forbids."""

import pytest

import check_layers


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("kernels/include/headwater/kernels/engine.h", "<cuda_runtime.h>"),
        ("kernels/include/headwater/kernels/engine.h", "<grpcpp/grpcpp.h>"),
        ("kernels/include/headwater/kernels/engine.h", '"google/protobuf/message.h"'),
        ("kernels/include/headwater/kernels/engine.h", '"absl/strings/str_cat.h"'),
        ("kernels/cpu/cpu_engine.cc", '"server/heads/head.h"'),
        ("kernels/cpu/cpu_engine.cc", "<cublas_v2.h>"),
        ("kernels/cpu/cpu_engine.cc", '"kernels/reference/reference_engine.h"'),
        ("kernels/cuda/engine.cu", '"server/heads/head.h"'),
        ("kernels/cpu/cpu_engine.cc", "<openssl/hmac.h>"),
        ("kernels/cuda/engine.cu", "<nccl.h>"),
        ("kernels/cuda/engine.cu", '"headwater/kernels/engine.h"'),
        ("kernels/cuda/device/row_math.cuh", '"absl/status/status.h"'),
        ("kernels/core/head_base.cc", "<cuda_runtime_api.h>"),
        ("kernels/cuda/engine_core.h", '"server/heads/head.h"'),
        ("kernels/comm/nccl_communicator.cc", '"server/scheduler/work_queue.h"'),
        ("server/heads/head.cc", '"headwater/v1/loss.pb.h"'),
        ("server/heads/head.cc", "<grpcpp/grpcpp.h>"),
        ("server/heads/head.cc", "<cuda_runtime_api.h>"),
        ("server/heads/head.cc", '"server/service/services.h"'),
        ("server/scheduler/work_queue.cc", '"kernels/cpu/cpu_engine.h"'),
        ("server/checkpoint/checkpoint_store.cc", '"server/transport/staging.h"'),
        ("server/transport/staging.cc", '"headwater/v1/loss_service.grpc.pb.h"'),
        ("server/transport/staging.cc", '"server/heads/head.h"'),
        ("server/service/loss/loss_service.cc", "<cuda_runtime.h>"),
        ("server/service/loss/loss_service.cc", "<nccl.h>"),
        ("server/main.cc", '"kernels/cpu/cpu_engine.h"'),
        ("server/model_files/head_tensors.cc", '"server/heads/head.h"'),
        ("server/model_files/head_tensors.cc", '"headwater/v1/loss.pb.h"'),
        ("server/model_files/head_tensors.cc", '"headwater/client/types.h"'),
        ("client/cpp/src/client.cc", '"server/heads/head.h"'),
        ("client/cpp/src/client.cc", '"server/model_files/head_tensors.h"'),
        ("client/ctl/command_load.cc", '"server/checkpoint/weights_reader.h"'),
        ("client/cpp/src/client.cc", '"headwater/kernels/engine.h"'),
        ("client/core/core.cc", '"client/cpp/src/convert.h"'),
        ("client/core/core.cc", '"headwater/client/head.h"'),
        ("client/core/include/headwater/client/c_api.h", '"headwater/client/types.h"'),
        ("client/cpp/include/headwater/client/client.h", "<grpcpp/channel.h>"),
        ("client/cpp/include/headwater/client/client.h", '"headwater/v1/loss.pb.h"'),
        ("tests/kernels/cpu_engine_test.cc", '"server/heads/head.h"'),
        ("tests/unit/head_test.cc", '"kernels/lab/experiment.h"'),
        ("server/heads/head.cc", '"head.h"'),
    ],
)
def test_forbidden_include_is_an_error(path, include):
    assert len(check_layers.check_file(path, f"#include <vector>\n  #  include {include}\n")) == 1


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("kernels/include/headwater/kernels/engine.h", '"absl/status/statusor.h"'),
        ("kernels/cpu/cpu_engine.cc", "<cblas.h>"),
        ("kernels/cuda/engine.cu", "<cublasLt.h>"),
        ("kernels/cuda/engine.cu", '"kernels/core/loss/row_loss.h"'),
        ("kernels/cuda/engine_core.h", '"absl/functional/function_ref.h"'),
        ("tests/kernels/cuda/cuda_memory_test.cc", "<cuda_runtime_api.h>"),
        ("kernels/comm/nccl_communicator.cc", "<nccl.h>"),
        ("kernels/comm/tcp_handshake.cc", "<openssl/hmac.h>"),
        ("server/heads/head.cc", '"server/observability/metrics.h"'),
        ("server/service/loss/loss_service.cc", '"headwater/v1/loss_service.grpc.pb.h"'),
        ("server/transport/staging.cc", "<sys/mman.h>"),
        ("client/cpp/src/client.cc", "<grpcpp/grpcpp.h>"),
        ("client/cpp/src/client.cc", '"client/core/core.h"'),
        ("client/core/core.cc", '"headwater/client/options.h"'),
        ("client/ctl/command_load.cc", '"server/model_files/head_tensors.h"'),
        ("server/checkpoint/weights_reader.cc", '"server/model_files/head_tensors.h"'),
    ],
)
def test_allowed_include_passes(path, include):
    assert check_layers.check_file(path, f"#include {include}\n") == []


def test_the_python_client_does_not_import_the_server():
    assert check_layers.check_file("client/python/headwater/x.py", "from server.heads import Head\n")
    assert not check_layers.check_file("client/python/headwater/x.py", "from headwater import Head\n")


def test_a_wrong_include_in_a_tree_is_found(tmp_path):
    (tmp_path / "server" / "heads").mkdir(parents=True)
    (tmp_path / "server" / "heads" / "head.cc").write_text("#include <vector>\n#include <nccl.h>\n")
    count, errors = check_layers.check_tree(tmp_path)
    assert count == 1
    assert len(errors) == 1
    assert errors[0].startswith("server/heads/head.cc:2:")
