"""Certificates and keys for tests, made by openssl."""

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
