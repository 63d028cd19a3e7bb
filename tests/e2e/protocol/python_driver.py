"""Runs the operations of a protocol case with the Python client: a line in, its outcome as a line of JSON out.

protocol_driver.cc is its twin. The first word of a line is the operation; `key=value` and bare words are its options. `on=NAME` is
the handle, without it "h"; `client=NAME` the client, without it "main".
"""

import concurrent.futures
import contextlib
import json
import sys
import warnings

import numpy as np

import headwater

HIDDEN_SIZE, VOCAB_SIZE = 4, 8


class Driver:
    """Clients, handles and calls under way, by name."""

    def __init__(self):
        self._clients = {}
        self._heads = {}
        self._results = {}
        self._futures = {}
        self._threads = concurrent.futures.ThreadPoolExecutor(4)

    def run(self, line):
        """The outcome of one line."""
        words, options = [], {}
        for word in line.split():
            name, equals, value = word.partition("=")
            if equals:
                options[name] = value
            else:
                words.append(word)
        operation, *words = words
        try:
            if operation == "start":
                name, operation, *words = words
                self._futures[name] = self._begin(operation, words, options)
                return {"ok": True}
            if operation == "end":
                return self._outcome(self._futures.pop(words[0]).result(60))
            if operation == "cancel":
                self._futures[words[0]].cancel()
                return {"ok": True}
            if operation == "pending":
                return {"ok": True, "pending": not self._futures[words[0]].done()}
            if operation in ("connect", "open", "close", "drop", "reset", "epoch"):
                return self._outcome(getattr(self, f"_{operation}")(words, options))
            return self._outcome(self._begin(operation, words, options).result(60))
        except headwater.HeadwaterError as error:
            outcome = {"ok": False, "reason": error.reason or error.code, "message": error.message}
            if isinstance(error, headwater.StepLostError) and error.restored_step is not None:
                outcome |= {"restored_step": error.restored_step, "checkpoint": error.checkpoint, "checkpoints": error.checkpoints}
            return outcome

    def _outcome(self, result):
        outcome = {"ok": True}
        if isinstance(result, headwater.LossResult):
            outcome |= {"attempt": result.attempt, "state": result.state}
        if isinstance(result, dict):
            outcome |= result
        return outcome

    # ---- clients and handles ------------------------------------------------------------------------------------------

    def _connect(self, words, options):
        name = options.get("client", "main")
        if name in self._clients:
            self._close([], options)
        policy = headwater.RetryPolicy(
            max_attempts=int(options.get("max_attempts", 3)),
            initial_backoff=float(options.get("backoff_ms", 2)) / 1000,
            max_backoff=float(options.get("max_backoff_ms", options.get("backoff_ms", 4))) / 1000,
        )
        lease_s = float(options.get("lease_ms", 30000)) / 1000
        replay_bytes = int(options.get("replay_bytes", 0))
        self._clients[name] = headwater.connect(
            options["target"],
            retries=policy,
            replay=replay_bytes > 0,
            replay_bytes=replay_bytes,
            replay_steps=int(options["replay_steps"]) if "replay_steps" in options else None,
            session=lease_s > 0,
            session_lease=lease_s or 30.0,
            transport="grpc",
        )
        return self._open(["h" if name == "main" else f"{name}-h"], {"client": name, "head": options.get("head", "h")})

    def _open(self, words, options):
        self._heads[words[0]] = self._clients[options.get("client", "main")].head(options.get("head", words[0]))

    def _drop(self, words, options):
        del self._heads[words[0]]

    def _close(self, words, options):
        client = self._clients.pop(options.get("client", "main"))
        self._heads = {name: head for name, head in self._heads.items() if head._backend is not client._backend}
        self._results.clear()
        client.close()

    def _reset(self, words, options):
        for future in self._futures.values():
            future.cancel()
        self._futures.clear()
        for name in list(self._clients):
            self._close([], {"client": name})

    def _epoch(self, words, options):
        return {"epoch": self._heads[words[0]].epoch.rstrip(b".").decode()}

    # ---- calls --------------------------------------------------------------------------------------------------------

    def _begin(self, operation, words, options):
        """Starts a call; its future."""
        head = self._heads.get(options.get("on", "h"))
        timeout = {"timeout_s": float(options["timeout_ms"]) / 1000} if "timeout_ms" in options else {}
        if "step" in options:
            head.step = int(options["step"])
        rows = np.full((2, HIDDEN_SIZE), float(options.get("value", 1)), np.float32)
        weight = np.full((VOCAB_SIZE, HIDDEN_SIZE), float(options.get("value", 1)), np.float32)
        if operation in ("loss", "forward"):
            return self._loss(operation, words, options, head, rows[:1], timeout)
        if operation in ("commit", "discard"):
            micro_batch = int(words[0])
            factor = {"factor": float(options.get("factor", 1))} if operation == "commit" else {}
            if "contribution" in words:
                return self._threads.submit(getattr(self._results[micro_batch], operation), **factor, **timeout)
            return getattr(head, f"{operation}_future")(micro_batch=micro_batch, **factor, **timeout)
        if operation == "seal":
            expected = (
                [int(word) for word in options["expected"].split("+")] if "+" in options["expected"] else int(options["expected"])
            )
            return head.seal_future(expected_micro_batches=expected, wait="wait" in words, **timeout)
        if operation == "apply":
            expected = {"expected_micro_batches": int(options["expected"])} if "expected" in options else {}
            return head.apply_optimizer_step_future(learning_rate=0.1, allow_empty=True, **expected, **timeout)
        if operation == "gradient_part":
            return head.add_gradient_future(rows, micro_batch=int(words[0]), **timeout)
        if operation == "replace":
            return head.replace_weight_future(weight, **timeout)
        if operation == "upload":
            return head.set_weight_future(weight, **timeout)
        if operation in ("save", "restore", "load", "delete_checkpoint"):
            overwrite = {"overwrite": "overwrite" in words} if operation == "save" else {}
            return getattr(head, f"{operation}_future")(words[0], **overwrite, **timeout)
        if operation == "list":
            return headwater.Client(head._backend).heads_future(**timeout)
        if operation == "take":
            return head.take_future(only_if_current="if_current" in words, **timeout)
        if operation in ("create", "attach"):
            if_exists = "attach" if operation == "attach" else "fail"
            shape = VOCAB_SIZE, HIDDEN_SIZE
            return headwater.Client(head._backend).create_head_future(
                words[0], shape, dtype="float32", if_exists=if_exists, **timeout
            )
        # discard_gradient, gradient, gradient_norm, weight, step_state, info, delete
        return getattr(head, f"{operation}_future")(**timeout)

    def _loss(self, operation, words, options, head, rows, timeout):
        arguments = {"return_grad_hidden": False, **timeout}
        if operation == "forward":
            return head.cross_entropy_future(rows, [1], backward=False, **timeout)
        micro_batch = int(words[0])
        arguments |= {"micro_batch": micro_batch, "commit": "explicit" if "explicit" in words else "eager"}
        if "attempt" in options:
            arguments["attempt"] = int(options["attempt"])
        if "teacher" in options:
            future = head.jsd_future(rows, self._heads[options["teacher"]], rows, **arguments)
        elif "joined" in options:
            joined = {"join_key": options["joined"], "total_rows": 1}
            future = head.jsd_future(rows, self._heads["teacher"], headwater.JOIN, **joined, **arguments)
        elif "also" in options:
            terms = [headwater.CrossEntropy([1], head=other) for other in (head, self._heads[options["also"]])]
            future = head.multi_future(rows, terms, **arguments)
        else:
            future = head.cross_entropy_future(rows, [1], **arguments)
        return _Loss(future, rows, lambda result: self._results.__setitem__(micro_batch, result))


class _Loss:
    """The future of a micro-batch, whose rows are overwritten as soon as it has ended."""

    def __init__(self, future, rows, keep):
        self._future, self._rows, self._keep = future, rows, keep

    def result(self, timeout_s):
        try:
            result = self._future.result(timeout_s)
        finally:
            self._rows[:] = -99
        self._keep(result)
        return result

    def __getattr__(self, name):
        return getattr(self._future, name)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    driver = Driver()
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            print(json.dumps(driver.run(line)), flush=True)
