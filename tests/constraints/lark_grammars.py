"""Lark grammars as people publish them: marks, aliases and comments at the ends of lines. Their
words have one reading each, so that a greedy lexer takes what every derivation does.
"""

OWN = {
    "arithmetic": r"""
        ?start: sum
        ?sum: product
            | sum "+" product -> add
            | sum "-" product -> sub
        ?product: power
            | product "*" power -> mul
        ?power: atom "^" power -> pow
            | atom
        ?atom: NUMBER -> number
            | "(" sum ")"
        %import common.NUMBER
    """,
    "symbolic expressions": r"""
        start: expr+
        ?expr: atom
             | list
             | quoted

        !quoted: "'" expr
        list: "(" expr* ")"
        ?atom: SYMBOL -> symbol
             | SIGNED_INT -> int
             | STRING -> string

        SYMBOL: /[a-z*\/<>=!?][a-z0-9*\/<>=!?-]*/
        STRING: /"[^"\\\n]*"/

        %import common.SIGNED_INT
        %import common.WS
        %ignore WS
    """,
    "boolean logic": r"""
        ?start: or_
        ?or_: and_ ("or" and_)*
        ?and_: not_ ("and" not_)*
        ?not_: "not" not_ -> negated
             | comparison
        ?comparison: value (OP value)?
        ?value: VARIABLE
              | "(" or_ ")"
              | "true"  -> true
              | "false" -> false
        OP: "==" | "!=" | "<" | "<="
        VARIABLE: "$" DIGIT   // one digit
        %import common (DIGIT)
        %ignore " "
    """,
    "sections of settings": r"""
        start: (section | COMMENT _NL)*
        section: header pair*
        !header: "[" NAME "]" _NL
        ?pair: NAME "=" value _NL
        ?value: INT -> int
              | "yes" -> yes
              | "no"  -> no
              | QUOTED
        NAME: /[a-z][a-z_]*/
        QUOTED: /'[^'\n]*'/
        COMMENT: /;[^\n]*/
        %import common.INT
        %import common.NEWLINE -> _NL
    """,
    "lists of one kind": r"""
        ?start: numbers | words
        numbers: "[" [INT ("," INT)*] "]"
        words: "[" WORD ("," WORD)* "]"
        %import common.INT
        %import common.WORD
        %ignore /[ \t]+/
    """,
    "query of a table": r"""
        start: "select"i columns "from"i NAME [where] [order] ";"?
        ?columns: "*" -> all
                | NAME ("," NAME)*
        where: "where"i condition ("and"i condition)*
        condition: NAME OPERATOR value
        ?order: "order"i "by"i NAME [DIRECTION]
        ?value: SIGNED_INT | TEXT
        DIRECTION: "asc"i | "desc"i
        OPERATOR: "=" | "<>" | "<" | ">"
        NAME: /`[a-z]+`/
        TEXT: /'[^']*'/
        %import common.SIGNED_INT
        %import common.WS_INLINE
        %ignore WS_INLINE
    """,
    "address of a page": r"""
        start: scheme "://" host [port] path [query] [fragment]
        !scheme: "http" | "https" | "ftp"
        ?host: LABEL ("." LABEL)*
        port: ":" DIGIT~1..5
        path: ("/" SEGMENT?)*
        ?query: "?" parameter ("&" parameter)*
        parameter: SEGMENT "=" SEGMENT?
        ?fragment: "#" SEGMENT
        LABEL: /[a-z0-9]+(-[a-z0-9]+)*/
        SEGMENT: /([a-z0-9~_-]|%[0-9A-F]{2})+/
        %import common.DIGIT
    """,
    "version": r"""
        start: core pre? build?
        core: NUM "." NUM "." NUM
        ?pre: "-" id ("." id)*
        ?build: "+" id ("." id)*
        ?id: ID
        NUM: "0" | "1".."9" DIGIT*
        ID: (LETTER | DIGIT | "-")+
        %import common.DIGIT
        %import common.LETTER
    """,
    "date and time": r"""
        start: date ["T" time]
        ?date: year "-" month "-" day
        year: DIGIT~4
        ?month: /0[1-9]|1[0-2]/
        ?day: /0[1-9]|[12][0-9]|3[01]/
        time: HOUR ":" MINUTE [":" MINUTE] zone?
        ?zone: "Z" -> utc
             | ("+" | "-") HOUR ":" MINUTE
        HOUR: /[01][0-9]|2[0-3]/
        MINUTE: "0".."5" DIGIT
        DIGIT: "0".."9"
    """,
    "chat of turns": r"""
        start: turn ~ 1..4
        ?turn: user | bot
        user: "<user>" TEXT "</user>"
        bot: "<bot>" [thought] TEXT "</bot>"
        ?thought: "(" TEXT ")"
        TEXT: /[A-Za-z ,.!?']+/
    """,
    "tags in tags": r"""
        start: element
        ?element: "<" NAME attribute* "/>" -> empty
                | "<" NAME attribute* ">" content* "</" NAME ">"
        ?content: element
                | WORDS
        attribute: " " NAME "=" VALUE
        NAME: /[a-z]+/
        VALUE: /"[a-z0-9 ]*"/
        WORDS: /[A-Z0-9][A-Za-z0-9 ]*/
    """,
    "lambda calculus": r"""
        ?start: term
        ?term: application
             | "\\" NAME "." term -> abstraction
        ?application: item
             | application " " item
        ?item: NAME
             | "(" term ")"
        NAME: "a".."z" /[0-9']/?
    """,
    "Roman numerals": r"""
        start: thousands hundreds tens ones
        thousands: "M"~0..3
        ?hundreds: "CM" | "CD" | "D"? "C"~0..3
        ?tens: "XC" | "XL" | "L"? "X"~0..3
        ?ones: "IX" | "IV" | "V"? "I"~0..3
    """,
    "command line": r"""
        start: program (" " argument)*
        program: WORD
        ?argument: flag | option | operand
        flag: "-" LETTER+
        !option: "--" WORD ("-" WORD)* ["=" /[a-z0-9.,]+/]
        ?operand: PATH
        PATH: /\.?(\/[a-z]+)+/ ["." WORD]
        WORD: /[a-z]+/   # in lower case
        LETTER: "a".."z" | "A".."Z"
    """,
    "assembler": r"""
        start: (line _NL)+
        ?line: label | instruction
        label: NAME ":"
        instruction: OPCODE operand ("," operand)? -> op
                   | "ret" -> ret
        ?operand: REGISTER
                | "#" HEXDIGIT+   -> immediate
                | "[" REGISTER ["+" INT] "]" -> memory
        OPCODE.2: "MOV" | "ADD" | "JMP"
        REGISTER: "R" DIGIT
        NAME: /_[a-z]+/
        _NL: /\n+/
        %import common (DIGIT, HEXDIGIT, INT)
        %ignore / +/
    """,
    "types of a language": r"""
        ?start: union
        ?union: optional ("|" optional)*
        ?optional: type "?" -> maybe
                 | type
        ?type: NAME -> name
             | NAME "[" union ("," union)* "]" -> generic
             | "(" union ")"
             | "{" field ("," field)* "}"
        field: NAME ":" union
        NAME: /[A-Z][a-z]+/
        %ignore " "
    """,
    "extended and replaced": r"""
        start: sign? item ("," item)*
        ?item: word
             | digits

        ?digits: DIGIT~1..2
        ?word: "one"
        sign: "+"
        %import common.DIGIT
        %extend ?word: "two" | "three"
        %override sign: "-"
    """,
    "templates": r"""
        ?start: block{assignment}
        ?block{item}: "{" sequence{item, ";"} "}"
        sequence{item, between}: [item (between item)*]
        assignment: NAME "=" value
        ?value: INT | call{value} | block{assignment}
        ?call{argument}: NAME "(" sequence{argument, ","} ")"
        NAME: /[a-z]/
        INT: /[0-9]/+
    """,
    "code with comments": r"""
        start: statement*
        ?statement: NAME "=" expr ";" -> assign
                  | "print" "(" expr ")" ";"
        ?expr: INT
             | STRING
             | NAME
             | expr "+" expr

        NAME: /[A-Z]+/
        STRING: ESCAPED_STRING
        %import common (INT, ESCAPED_STRING, WS, C_COMMENT)
        %ignore WS
        %ignore C_COMMENT
        %ignore /#[^\n]*\n/
    """,
    "letters of many scripts": r"""
        start: "«" word (" " word)* "»" [mark]
        ?word: LATIN | GREEK | "ß"i
        ?mark: "\u2026" | "!"
        LATIN: /[a-zà-öø-ÿ]+/
        GREEK: "α".."ω"+
    """,
}
