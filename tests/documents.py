"""Documents, spreadsheets and hostile archives for tests, written without other packages."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"


def write_zip(path: Path, files: Mapping[str, str | bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def relations(**targets: str) -> str:
    """A list of related parts: kind -> target."""
    listed = "".join(
        f'<Relationship Id="{kind}" Type="{OFFICE}/{kind}" Target="{target}"/>'
        for kind, target in targets.items()
    )
    return f"<Relationships>{listed}</Relationships>"


def docx(body: str, styles: str = "") -> dict[str, str]:
    return {
        "_rels/.rels": relations(officeDocument="word/document.xml"),
        "word/_rels/document.xml.rels": relations(styles="styles.xml"),
        "word/document.xml": f'<w:document xmlns:w="w"><w:body>{body}</w:body></w:document>',
        "word/styles.xml": f'<w:styles xmlns:w="w">{styles}</w:styles>',
    }


def xlsx(rows: str, texts: str = "", styles: str = "") -> dict[str, str]:
    return {
        "_rels/.rels": relations(officeDocument="xl/workbook.xml"),
        "xl/_rels/workbook.xml.rels": relations(
            worksheet="worksheets/sheet1.xml", sharedStrings="texts.xml", styles="styles.xml"
        ),
        "xl/workbook.xml": f'<workbook xmlns="{MAIN}" xmlns:r="{OFFICE}"><sheets>'
        '<sheet name="One" sheetId="1" r:id="worksheet"/></sheets></workbook>',
        "xl/worksheets/sheet1.xml": f"<worksheet><sheetData>{rows}</sheetData></worksheet>",
        "xl/texts.xml": f"<sst>{texts}</sst>",
        "xl/styles.xml": f"<styleSheet>{styles}</styleSheet>",
    }


def epub(**chapters: str) -> dict[str, str]:
    items = "".join(f'<item id="{n}" href="text/{n}%20x.xhtml"/>' for n in chapters)
    spine = "".join(f'<itemref idref="{name}"/>' for name in chapters)
    return {
        "META-INF/container.xml": '<container><rootfiles><rootfile full-path="OPS/p.opf"/>'
        "</rootfiles></container>",
        "OPS/p.opf": f"<package><manifest>{items}</manifest><spine>{spine}</spine></package>",
        **{f"OPS/text/{name} x.xhtml": text for name, text in chapters.items()},
    }


def pdf(*objects: str | bytes, catalog: str = "<</Type/Catalog/Pages 2 0 R>>") -> bytes:
    """A PDF of a catalog and of objects from number 2 on."""
    parts, places = b"%PDF-1.7\n", []
    for number, each in enumerate((catalog, *objects), 1):
        places.append(len(parts))
        content = each if isinstance(each, bytes) else each.encode()
        parts += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    count = len(places) + 1
    return parts + (
        b"xref\n0 %d\n0000000000 65535 f \n%b" % (count, table)
        + b"trailer\n<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (count, len(parts))
    )


def stream(content: bytes, more: str = "") -> bytes:
    return b"<</Length %d%b>>\nstream\n%b\nendstream" % (len(content), more.encode(), content)


def pdf_pages(*pages: bytes, catalog: str = "<</Type/Catalog/Pages 2 0 R>>") -> bytes:
    """A PDF whose pages have these streams (dictionary and content)."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects: list[str | bytes] = [
        f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for number, page in enumerate(pages):
        objects += [
            "<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Resources<</Font<</F 3 0 R>>>>"
            f"/Contents {5 + 2 * number} 0 R>>",
            page,
        ]
    return pdf(*objects, catalog=catalog)


def shown(*lines: str) -> bytes:
    """A page's stream that shows lines of text."""
    text = " ".join(f"({line}) Tj 0 -14 Td" for line in lines)
    return stream(f"BT /F 12 Tf 50 700 Td {text} ET".encode())
