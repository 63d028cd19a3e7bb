"""What the pages' fragments of programs take for granted, by the fragment's beginning.

A page shows a fragment where a whole program would hide its point. The names that it uses, and nothing else, are made here;
`ADDRESS` is a server's.
"""

ARRAYS = """
import numpy as np
import headwater
random = np.random.default_rng(0)
num_tokens = 6
weight, teacher_weight = random.standard_normal((48, 16), np.float32), random.standard_normal((48, 24), np.float32)
hidden, teacher_hidden = random.standard_normal((6, 16), np.float32), random.standard_normal((6, 24), np.float32)
targets = random.integers(0, 48, 6, dtype=np.int32)
"""

MODEL = """
import torch
import headwater, headwater.torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.lm_head = torch.nn.Embedding(48, 16), torch.nn.Linear(16, 48, bias=False)
    def forward(self, tokens):
        return self.lm_head(self.body(tokens))

torch.manual_seed(0)
model = Model()
body = model.body
optimizer = torch.optim.AdamW(body.parameters(), lr=1e-2)
inputs = targets = torch.arange(12).reshape(2, 6)
client = headwater.connect(ADDRESS)
"""

ATTACHED = (
    MODEL
    + """
head = headwater.torch.attach(client, "attached", model.lm_head, model=model, optimizer=headwater.AdamW())
loss_fn = headwater.torch.CrossEntropyLoss(head)
"""
)

TEACHER = (
    MODEL
    + """
VALID, teacher, student = 48, (body, model.lm_head), (body, model.lm_head)
tokens = torch.arange(12).reshape(2, 6)
teacher_head = headwater.torch.attach(client, "stored", model.lm_head, model=model, trainable=False)
loss_fn = headwater.torch.JSDLoss(teacher_head, teacher_head)
"""
)

CONTEXTS = {
    # A teacher's rows.
    "from headwater.teachers import": TEACHER,
    "loss_fn = headwater.torch.JSDLoss(head, beta=0": TEACHER
    + """
head, ids, log_probs = teacher_head, tokens[..., None], torch.zeros(2, 6, 1)
""",
    "token_ids, rows = headwater.vllm.read": MODEL
    + """
import json, struct
import headwater.vllm
entries = {
    "hidden_states": {"dtype": "F32", "shape": [2, 1, 16], "data_offsets": [0, 128]},
    "token_ids": {"dtype": "I64", "shape": [2], "data_offsets": [128, 144]},
}
header = json.dumps(entries).encode()
hidden_states_path = "request.safetensors"
with open(hidden_states_path, "wb") as file:
    file.write(struct.pack("<Q", len(header)) + header + torch.randn(2, 1, 16).numpy().tobytes() + struct.pack("<qq", 5, 6))
norm = torch.nn.LayerNorm(16)
""",
    # Python by arrays: README of the package, and docs/api.md.
    "import headwater": ARRAYS,
    'client = headwater.connect("localhost:50051")  ': ARRAYS,
    # Python by torch.
    'loss_fn = headwater.torch.CrossEntropyLoss(head, reduction="mean")': ATTACHED + "micro_batches = [(inputs, targets)] * 2\n",
    "scale = scaler.get_scale()": ATTACHED + "hidden, scaler = body(inputs), torch.cuda.amp.GradScaler(enabled=False)\n",
    'model.save_pretrained("trained")': ATTACHED
    + """
import json, os, struct
def save_pretrained(folder):
    os.mkdir(folder)
    data = model.lm_head.weight.detach().numpy().tobytes()
    entry = {"lm_head.weight": {"dtype": "F32", "shape": [48, 16], "data_offsets": [0, len(data)]}}
    header = json.dumps(entry).encode()
    with open(folder + "/model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + data)
model.save_pretrained = save_pretrained
""",
    'head = headwater.torch.attach(client, "student", model.lm_head, model=model, optimizer=headwater.AdamW())': MODEL
    + """
MICRO_BATCHES = 2
micro_batches = lambda step: [(inputs, targets)] * MICRO_BATCHES
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
""",
    # Python by the generated stubs.
    "import array, fcntl, mmap, os, socket, struct": """
import grpc
from headwater.v1.session_service_pb2 import GetServerInfoRequest, OpenSessionRequest, RegisterSharedMemoryRequest
from headwater.v1.session_service_pb2_grpc import SessionServiceStub
sessions = SessionServiceStub(grpc.insecure_channel(ADDRESS))
info = sessions.GetServerInfo(GetServerInfoRequest())
session_id = sessions.OpenSession(OpenSessionRequest()).session_id
""",
    # Connections with TLS and a token.
    'client = headwater.connect("headwater.example:50051"': "import headwater\n",
    "client = headwater.connect(\n": "import headwater\n",
    # C++ statements: what stands before them in their function.
    "headwater::client::ClientOptions options;": "const std::string token;\n",
}
