"""Checks objects against the strict API schemas of the two newest Kubernetes versions that kubernetes-validate carries.

Standard input is a JSON list of [where, object]. Standard output is a JSON object: the versions, errors, and kinds that have no
schema (those of custom resources). PYTHONPATH has kubernetes-validate.
"""

import json
import sys

import kubernetes_validate


def main() -> None:
    pairs = json.load(sys.stdin)
    versions = kubernetes_validate.utils.all_versions()[-2:]
    versions = [version.rsplit(".", 1)[0] for version in versions]
    errors, unknown = [], set()
    for version in versions:
        for where, document in pairs:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                path = ".".join(map(str, error.absolute_path))
                errors.append(
                    f"{where}: {document['kind']}/{document['metadata']['name']}: Kubernetes {version}: {path}: {error.message}"
                )
            except kubernetes_validate.SchemaNotFoundError:
                unknown.add(document["apiVersion"] + "/" + document["kind"])
    json.dump({"versions": versions, "errors": errors, "unknown": sorted(unknown)}, sys.stdout)


if __name__ == "__main__":
    main()
