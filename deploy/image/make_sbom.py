"""Writes down what is in the image, as SPDX 2.3: packages with their versions, files with their checksums, and which has which."""

import dataclasses
import datetime
import hashlib
import re
from pathlib import Path

NONE = "NOASSERTION"


@dataclasses.dataclass(frozen=True)
class Package:
    """One package of the distribution, or with a `supplier` something else."""

    name: str
    version: str
    architecture: str
    source: str
    supplier: str = ""


def identifier(kind: str, name: str) -> str:
    """An SPDX id: letters, digits, dots and hyphens only."""
    return f"SPDXRef-{kind}-" + re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")


def package_entry(package: Package, distribution: str, own: bool, revision: str) -> dict:
    entry = {
        "SPDXID": identifier("Package", package.name),
        "name": package.name,
        "versionInfo": package.version,
        "supplier": package.supplier or f"Organization: {distribution.split('-')[0].capitalize()}",
        "downloadLocation": NONE,
        "filesAnalyzed": False,
        "licenseConcluded": "Apache-2.0" if own else NONE,
        "licenseDeclared": "Apache-2.0" if own else NONE,
        "copyrightText": NONE,
    }
    if own:
        entry["sourceInfo"] = f"commit {revision}"
    elif not package.supplier:
        system, release = distribution.split("-", 1)
        version = package.version.replace(":", "%3A").replace("+", "%2B")
        locator = (
            f"pkg:deb/{system}/{package.name.replace('+', '%2B')}@{version}?arch={package.architecture}&distro={system}-{release}"
        )
        entry["sourceInfo"] = f"source package {package.source}; its licence is /usr/share/doc/{package.name}/copyright"
        entry["externalRefs"] = [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": locator}]
    return entry


def document(
    root: Path, own: Package, contents: dict[Package, list[str]], name: str, revision: str, epoch: int, distribution: str
) -> dict:
    """The SPDX document of the image whose files are in `root`; `contents`: the files, as /path, that came with each package."""
    files, relationships = [], []
    for package in sorted(contents, key=lambda entry: entry.name):
        for path in contents[package]:
            data = (root / path.removeprefix("/")).read_bytes()
            files.append(
                {
                    "SPDXID": identifier("File", path),
                    "fileName": "." + path,
                    "checksums": [
                        {"algorithm": "SHA1", "checksumValue": hashlib.sha1(data).hexdigest()},
                        {"algorithm": "SHA256", "checksumValue": hashlib.sha256(data).hexdigest()},
                    ],
                    "licenseConcluded": NONE,
                    "copyrightText": NONE,
                }
            )
            relationships.append((identifier("Package", package.name), "CONTAINS", identifier("File", path)))
        if package != own:
            relationships.append((identifier("Package", own.name), "DEPENDS_ON", identifier("Package", package.name)))
    # The same contents have the same name: nothing is drawn at random.
    digest = hashlib.sha256("".join(file["checksums"][1]["checksumValue"] for file in files).encode()).hexdigest()
    created = datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": name,
        "documentNamespace": f"https://headwater.dev/spdx/{name}-{own.version}-{digest[:32]}",
        "creationInfo": {"created": created, "creators": ["Tool: headwater-make_sbom"]},
        "packages": [
            package_entry(package, distribution, package == own, revision)
            for package in sorted(contents, key=lambda entry: entry.name)
        ],
        "files": files,
        "relationships": [
            {
                "spdxElementId": "SPDXRef-DOCUMENT",
                "relationshipType": "DESCRIBES",
                "relatedSpdxElement": identifier("Package", own.name),
            },
            *({"spdxElementId": a, "relationshipType": kind, "relatedSpdxElement": b} for a, kind, b in relationships),
        ],
    }
