"""GBNF as in llama.cpp: every text of a grammar is allowed, and may end."""

from __future__ import annotations

import pytest

import eecore
from eecore import Guide, GuideError
from eecore.planning.gbnf import is_gbnf, lark_of
from eecore.planning.guided import Guides

SUM = r"""root ::= (sum "=" gap num "\n")+
sum ::= num ([-+*/] gap num)*
num ::= name | [0-9]+ gap | "(" gap sum ")" gap
name ::= [a-z] [a-z0-9_]* gap
gap ::= [ \t\n]*
"""
JSON = r"""# a value within values
root ::= map
any ::= map | list | text | number | ("true" | "false" | "null") gap

map ::=
  "{" gap (
    text ":" gap any
    ("," gap text ":" gap any)*
  )? "}" gap
list ::= "[" gap ( any ("," gap any)* )? "]" gap
text ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" gap # escapes
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? gap
gap ::= | " " | "\n" [ \t]{0,20}
"""
CODE = r"""root ::= (declaration)*
declaration ::= type name "(" argument? ")" "{" statement* "}"
type ::= "int" gap | "char" gap
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
argument ::= type name
statement ::= ( type name gap "=" gap value ";" ) | ( name gap "=" gap value ";" ) |
  ( "while" "(" value ")" "{" statement* "}" ) | ( "//" [^\n]* "\n" )
value ::= term (("+" | "-") gap term)*
term ::= name | [0-9]+ | "(" value ")"
gap ::= [ \t\n]*
"""
CHESS = r"""root ::= "1. " ply " " ply "\n" ([1-9] [0-9]? ". " ply " " ply "\n")+
ply ::= (pawn | piece | castle) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""
# Grammars, texts of them, and texts that are none.
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "numbers": ('root ::= num "0"\nnum ::= [0-9]+\n', ["10", "1230", "00"], ["0", "1", ""]),
    "names": ('root ::= name "!"\nname ::= [a-z!]+', ["ab!", "!!", "a!b!"], ["!", "ab"]),
    "runs": ('root ::= "a" ws ws "b"\nws ::= [ ]+\n', ["a  b", "a    b"], ["a b", "ab"]),
    "no runs": ('root ::= "a" ws ws "b"\nws ::= [ ]*\n', ["ab", "a b"], ["a"]),
    "words": ('root ::= (x ","?)+\nx ::= [a-z]+\n', ["ab", "ab,c", "a,"], [",a", ""]),
    "beginnings": ('root ::= "a" "bd" | "abc" | "x" root', ["abd", "abc", "xxabd"], ["ab", "x"]),
    "windows": ('root ::= "a"\r\n | "b" c\r\n\r\nc ::= "c"\r\n', ["a", "bc"], ["b", "\r"]),
    "old mac": ('root ::= "a" c\rc ::= "c"', ["ac"], ["a"]),
    "lines": ('root ::=\n  "a" |\n  ("b"\n | # why\n "c")\n', ["a", "b", "c"], ["", "ab"]),
    "escapes": (r'root ::= "\x41\u00e9\U0001F600\"\\\t" [\]\[\x2d-]', ['Aé😀"\\\t]'], ["A"]),
    "hyphens": ("root ::= [a-] [-b] [^-]", ["--x", "abé"], ["---", "b-x"]),
    "any": ('root ::= "<" . .* ">"', ["<a>", "<\n>", "<é>>"], ["<>", "<a"]),
    "times": ('root ::= "ab"{2} "c"{1,2} "d"{0} "e"{ 1, }', ["ababce", "ababccee"], ["abce"]),
    "of times": ('root ::= ("a"{2}){2}? "b"', ["b", "aaaab"], ["aab"]),
    "nothing": ('root ::= "" | a\na ::= "a" a | ""', ["", "aaa"], ["b"]),
    "itself": (
        'root ::= item | root "," item\nitem ::= "(" root ")" | [a-z]+',
        ["(a,b),c"],
        ["(a"],
    ),
    "at the end": ('root ::= "(" root ")" | x\nx ::= [a-z ] x | "."', ["((a b.))"], ["(a b)"]),
    "no end": ('root ::= "a" | b* "c" | b\nb ::= "b" b', ["a", "c"], ["b", "bc"]),
    "twice": ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),
    "sums": (SUM, ["1+2= 3\n", "(a1+ 2 )*x = 3\n\n", "((1))=1\n2=2\n"], ["1+2=3", "(1=1\n"]),
    "json": (JSON, ["{}", '{"a": [1, -2.5e3, "x\\n\\u00ffé"], "b":\n  {"c": null}}'], ["[1]", "{"]),
    "json list": (JSON.replace("root ::= map", "root ::= list"), ['[1,{"a":[]}]\n '], ["{}", "[1"]),
    "list": (
        'root ::= line+\nline ::= "- " [^\\r\\n\\x0b]+ "\\n"',
        ["- a b\n- c\n"],
        ["- \n", "a"],
    ),
    "code": (CODE, ["int f(char a){int x = (a+1)-2;x=y;}", "int f(){// é\n}"], ["int f(", "x=1;"]),
    "chess": (CHESS, ["1. e4 e5\n2. O-O-O+ Qxf7#\n"], ["1. e4 e5\n"]),
    "english": ("root ::= c+ ([ \\n] c+)*\nc ::= [a-z] | [.,!]", ["it is, so."], [" a", "é"]),
    "japanese": (
        "root ::= c+ ([ \\n] c+)*\nc ::= hira | kata | kanji\nhira ::= [ぁ-ゟ]\nkata ::= [ァ-ヿ]\n"
        "kanji ::= [一-龯]",
        ["こんにちは 日本カ"],
        ["abc", "日 "],
    ),
}


@pytest.fixture(scope="module")
def guides(tiny: eecore.Model) -> Guides:
    return Guides(tiny.tokenizer, tiny.config.vocab_size, tiny.config.eos_token_ids)


def may_be(guides: Guides, tiny: eecore.Model, grammar: str, text: str) -> bool:
    """Whether a text is one of a grammar, token by token."""
    assert tiny.tokenizer is not None
    ids = tiny.tokenizer.encode(text, add_special_tokens=False) if text else []
    with guides.follow(Guide.grammar(grammar))._at([]) as matcher:
        if matcher.validate_tokens(ids) < len(ids):
            return False
        return matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", CASES)
def test_texts_of_a_grammar(guides: Guides, tiny: eecore.Model, name: str) -> None:
    grammar, texts, others = CASES[name]
    assert is_gbnf(grammar)
    for text in texts:
        assert may_be(guides, tiny, grammar, text), text
    for text in others:
        assert not may_be(guides, tiny, grammar, text), text


def test_rules_that_are_no_terminals_are_told_from_lark() -> None:
    assert is_gbnf('# start: "a"\n\n start ::= "b"\nroot ::= start')
    assert is_gbnf("root\n::= x")
    for lark in ('start: "a ::= b"', '// root ::= "a"\nstart: "a"', "%llguidance {}", 'a: "b"', ""):
        assert not is_gbnf(lark)


def test_a_long_text_costs_a_character_no_more_than_a_short_one(
    guides: Guides, tiny: eecore.Model
) -> None:
    """Rules call themselves at their end, as llama.cpp needs it, in place of repetitions."""
    grammar = 'root ::= "(" root ")" | x\nx ::= [a-z ] x | "."'
    assert may_be(guides, tiny, grammar, "(" + "so it goes " * 300 + ".)")


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('rot ::= "a"', "GBNF: expected a rule named root, got rot"),
        ("root ::= other", "GBNF: expected a rule named other, got none"),
        ('root ::= "a', "GBNF, line 1: expected a character, got 'the end'"),
        ('root ::= "a"\nx ::= [b', "line 2: expected a character"),
        (r'root ::= "\q"', r"expected an escape: .*, got '\\\\q"),
        (r'root ::= "\x4"', "expected an escape"),
        (r'root ::= "\uD800"', "expected a character of Unicode"),
        ("root ::= [z-a]", "expected a range of characters"),
        ("root ::= []", "expected a set with a character in it"),
        ('root ::= ("a"', r"expected \)"),
        ('root ::= "a")', "expected the end of a line"),
        ('root ::= "a"{3,1}', r"expected {least,most}, got \{3,1}"),
        ('root ::= "a"{1000000}', "expected a number of at most 100000"),
        ('root ::= "a"{x}', "expected a number"),
        ('root ::= "a" "b" | * "c"', "expected the end of a line"),
        ("root ::= " + "(" * 5000, "expected at most 100 brackets in one another"),
        ("root ::= <think>", "tokens by name or number are not supported"),
        ('root ::= "a"\n"b"', "expected the name of a rule"),
        ("root ::= root", "expected a rule root that matches some text"),
        ('root ::= "a" root', "expected a rule root that matches some text"),
    ],
)
def test_what_is_no_grammar(guides: Guides, grammar: str, message: str) -> None:
    with pytest.raises(GuideError, match=message):
        guides.follow(Guide.grammar(grammar))


def test_each_lexeme_is_a_character_where_a_rule_contains_itself() -> None:
    lark = lark_of('root ::= "ab" root "c" | [x-z]')
    assert lark.startswith(
        "start: r0\nr0: ((/[\\x{61}-\\x{61}]/ /[\\x{62}-\\x{62}]/) r0 (/[\\x{63}"
    )
