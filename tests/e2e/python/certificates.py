"""Certificates and keys for tests, made by openssl, and tokens."""

import hashlib
import json
import subprocess


def openssl(directory, *arguments):
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


def make_key(directory, name, *arguments):
    """A key and a request, or with arguments for it a certificate that signs itself."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key"]
    openssl(directory, "req", *key, "-subj", f"/CN={name}", *arguments)


def make_authority(directory, name, days=2):
    """`name`.crt and `name`.key of an authority."""
    make_key(directory, name, "-x509", "-days", str(days), "-out", f"{name}.crt")


def make_signed(directory, name, authority="ca", days=2):
    """`name`.crt and `name`.key, signed by the authority, for a server or client on this host."""
    (directory / "san").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    make_key(directory, name, "-out", f"{name}.csr")
    signed = ["-CA", f"{authority}.crt", "-CAkey", f"{authority}.key", "-CAcreateserial", "-days", str(days), "-extfile", "san"]
    openssl(directory, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signed)


def make_access(directory, token, **permissions):
    """Certificates of a server, a client and their authority, and a file with a trainer's token; a server's flags by part."""
    make_authority(directory, "ca")
    for name in ("server", "client"):
        make_signed(directory, name)
    entry = {"name": "trainer", "compute": ["*"], "sha256": hashlib.sha256(token.encode()).hexdigest(), **permissions}
    (directory / "tokens.json").write_text(json.dumps({"tokens": [entry]}))
    return {
        "tls": [f"--tls_certificate={directory}/server.crt", f"--tls_key={directory}/server.key"],
        "clients": [f"--tls_client_ca={directory}/ca.crt"],
        "tokens": [f"--token_file={directory}/tokens.json"],
    }
