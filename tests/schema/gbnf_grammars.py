"""Grammars in GBNF in the forms that people write for llama.cpp, each with whole texts and others."""

ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
MOVES = r"""
# Two moves a line, as "1. e4 e5".
root    ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move    ::= (pawn | piece | castle) [+#]?
piece   ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn    ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBQR])?
castle  ::= "O-O" "-O"?
"""
ITEMS = r"""
root ::= item+
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [1-9] [0-9]{0,15})? ws
# no end without a mark
ws ::= | " " | "\n" [ \t]{0,20}
"""
PROGRAM = r"""
root        ::= declaration*
declaration ::= type identifier "(" parameter? ")" "{" statement* "}"
type        ::= "int" | "float" | "char"
identifier  ::= [a-zA-Z_] [a-zA-Z_0-9]*
parameter   ::= type identifier
statement   ::= ( type identifier ws "=" ws expression ";" ) | ( identifier ws "=" ws expression ";" ) |
  ( identifier ws "(" arguments? ")" ";" ) | ( "return" ws expression ";" ) |
  ( "while" "(" condition ")" "{" statement* "}" ) | ( "//" [^\n]* "\n" )
condition   ::= expression operator expression
operator    ::= ("<=" | "<" | "==" | "!=" | ">=" | ">")
expression  ::= term (("+" | "-") term)*
term        ::= factor (("*" | "/") factor)*
factor      ::= identifier | number | "-" factor | identifier "(" arguments? ")" | "(" expression ")"
arguments   ::= expression ("," ws expression)*
number      ::= [0-9]+
ws          ::= ([ \t\n]+)
"""
GBNF: dict[str, tuple[str, list[str], list[str]]] = {
    "arithmetic": (
        ARITHMETIC,
        ["1=1\n", "(12 +x_1)*4= 60\n", "( 1/2\t) -3=\n 0\n", "a =\tb\n\nc=1\n\n", "a=b\nc= d \n\n"],
        ["1=1", "1=\n", "=1\n", "A=1\n", "1 = (\n", "a=b \n c=1"],
    ),
    "moves": (
        MOVES,
        ["1. e4 e5\n2. Nf3 Nc6\n", "1. d4 exd5\n2. O-O-O+ a8=Q#\n10. Rad1 Nbxd7\n", "1. Bb5 a6\n9. O-O O-O\n"],
        ["1. e4 e5\n", "1. e9 e5\n2. e4 e5\n", "1. e4 e5\n2. e4 e5", "1. e4  e5\n2. e4 e5\n"],
    ),
    "items": (
        ITEMS,
        ["- a\n", "- eggs & milk\n- größe 日本 🎈\n", "- - \n"],
        ["- \n", "a\n", "- a", "- a\n\n", "- a\r\n"],
    ),
    "json": (
        JSON,
        ["{}", '{ "a": 1}', '{"a":[1, -2.5e+3 ,{}\n  ,[]],\n\t"b" : "\\u00e9\\n\\"x" } ', '{"é": null ,"b":true\n }\n'],
        ["[]", '{"a":}', '{"a": 1,}', "{  }", '{"a": "\n"}', '{"a": "\\x"}', '{"a": 01}'],
    ),
    "program": (
        PROGRAM,
        ["", "intmain(){}", "intf(floatx){return x*(y+-2);}chara(){}",
         "intf(){intx =\n1;x = g(1, 2)-3;while(x<=y){g (x);//a b;}\n}}"],
        ["int f(){}", "intf(){x=1;}", "intf(){return x}", "intf(){//x}", "intf(){while(x){}}"],
    ),
}  # fmt: skip
