"""Types in the raw layers of Rust and C#: parameters and results of every function, and the fields
of every struct, are of the kind that the header says. Layout tests see sizes and offsets, not if
four bytes are a number or a float, nor what a function takes. (Go uses the C compiler's own types.)

Kinds: pointer, i32, u32, i64, u64, f32, f64, size, void; u8[32] and the like for arrays.
"""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

C_KINDS = {"int32_t": "i32", "kv_status": "i32", "uint32_t": "u32", "int64_t": "i64",
           "uint64_t": "u64", "kv_seq": "u64", "float": "f32", "double": "f64", "size_t": "size",
           "void": "void", "char": "u8"}
RUST_KINDS = {"i32": "i32", "kv_status": "i32", "u32": "u32", "i64": "i64", "u64": "u64",
              "kv_seq": "u64", "f32": "f32", "f64": "f64", "usize": "size", "c_char": "u8",
              "u8": "u8"}
CSHARP_KINDS = {"int": "i32", "uint": "u32", "long": "i64", "ulong": "u64", "float": "f32",
                "double": "f64", "UIntPtr": "size", "void": "void", "byte": "u8"}


def without_comments(text):
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"//.*", "", text)
    return re.sub(r"^\s*(#\[.*?\]|\[\w.*?\])\s*$", "", text, flags=re.M)


def c_kind(text):
    """Kind of a C type, with or without a name behind it."""
    if "*" in text:
        return "pointer"
    return C_KINDS[re.sub(r"\b(const|struct)\b", "", text).split()[0]]


def c_functions(header):
    found = {}
    for match in re.finditer(r"\bKV_API\s+(?:KV_MUST_CHECK\s+)?(.*?)\b(kv\w+)\((.*?)\);", header,
                             re.S):
        result, name, parameters = match.groups()
        listed = [] if parameters.strip() == "void" else split_parameters(parameters)
        found[name] = (c_kind(result), [c_kind(parameter) for parameter in listed])
    return found


def split_parameters(text):
    return [part for part in (p.strip() for p in text.split(",")) if part]


def c_structs(header):
    found = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", header, re.S):
        fields = []
        # A hook's own parameters hold commas and semicolons of no concern here.
        for field in re.sub(r"\(\*(\w+)\)\s*\(.*?\);", r"*\1;", body, flags=re.S).split(";"):
            words = field.strip()
            if not words:
                continue
            array = re.search(r"\[(\d+)\]", words)
            kind = c_kind(words) + (f"[{array[1]}]" if array else "")
            fields += [kind] * len(words.split(","))
        found[name] = fields
    return found


def rust_kind(text):
    text = text.strip()
    if text.startswith(("*", "Option<")):
        return "pointer"
    array = re.match(r"\[(\w+); (\d+)\]", text)
    return f"{RUST_KINDS[array[1]]}[{array[2]}]" if array else RUST_KINDS[text]


def rust_functions(text):
    found = {}
    for name, parameters, result in re.findall(r"pub fn (kv\w+)\((.*?)\)(?:\s*->\s*(.*?))?;", text,
                                               re.S):
        kinds = [rust_kind(p.split(":", 1)[1]) for p in split_parameters(parameters)]
        found[name] = (rust_kind(result) if result else "void", kinds)
    return found


def rust_structs(text):
    found = {}
    for name, body in re.findall(r"pub struct (kv_\w+) \{(.*?)\n\}", text, re.S):
        # One line per field once hooks' types are cut short.
        body = re.sub(r"Option<.*?>,\n", "Option<>,\n", body, flags=re.S)
        fields = re.findall(r"pub \w+:\s*(.*?),\n", body + "\n")
        found[name] = [rust_kind(field) for field in fields]
    return found


def csharp_kind(text):
    text = text.strip()
    return "pointer" if text.endswith("*") or text == "IntPtr" else CSHARP_KINDS[text]


def csharp_functions(text):
    found = {}
    for result, name, parameters in re.findall(
            r"static extern (?:unsafe )?(\S+) (kv\w+)\((.*?)\);", text, re.S):
        kinds = [csharp_kind(p.rsplit(None, 1)[0]) for p in split_parameters(parameters)]
        found[name] = (csharp_kind(result), kinds)
    return found


def csharp_structs(text):
    found = {}
    for name, body in re.findall(r"struct (kv_\w+)\s*\{(.*?)\n    \}", text, re.S):
        fields = []
        for fixed, kind, names in re.findall(r"public (fixed )?(\S+) ([@\w, \[\]]+);", body):
            array = re.search(r"\[(\d+)\]", names)
            fields += [csharp_kind(kind) + (f"[{array[1]}]" if fixed else "")] * len(
                names.split(","))
        found[name] = fields
    return found


def read(pattern):
    return without_comments("\n".join(p.read_text() for p in sorted(ROOT.glob(pattern))))


class Signatures(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        header = "\n".join(re.sub(r"^#.*(\\\n.*)*", "", read(f"include/kvrt/{name}"), flags=re.M)
                           for name in ("kvrt.h", "kv_cuda.h"))
        self.functions = c_functions(header)
        self.structs = c_structs(header)
        symbols = {symbol for name in ("symbols.txt", "cuda_symbols.txt")
                   for symbol in (ROOT / "tests/abi/golden" / name).read_text().split()}
        self.assertEqual(set(self.functions), symbols, "the header was not read to the end")
        self.assertGreater(len(self.structs), 20)

    def test_rust(self):
        text = read("bindings/rust/kvrt-sys/src/*.rs")
        self.assertEqual(rust_functions(text), self.functions)
        structs = rust_structs(text)
        self.assertEqual({name: structs.get(name) for name in self.structs}, self.structs)

    def test_csharp(self):
        text = read("bindings/csharp/Kvrt/Native/*.cs")
        self.assertEqual(csharp_functions(text), self.functions)
        structs = csharp_structs(text)
        self.assertEqual({name: structs.get(name) for name in self.structs}, self.structs)

    def test_a_wrong_type_would_be_found(self):
        text = read("bindings/rust/kvrt-sys/src/*.rs")
        wrong = text.replace("fence: u64) -> kv_status;", "fence: u32) -> kv_status;", 1)
        self.assertNotEqual(rust_functions(wrong), self.functions)
        wrong = text.replace("softmax_scale: f32", "softmax_scale: u32", 1)
        self.assertNotEqual(rust_structs(wrong)["kv_layer"], self.structs["kv_layer"])


if __name__ == "__main__":
    unittest.main()
