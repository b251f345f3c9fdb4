package wireproxy

import (
	"bytes"
	"encoding/binary"
	"strings"
)

// Codes in place of a protocol version in the untyped messages that begin a connection.
const (
	cancelRequest = 80877102
	sslRequest    = 80877103
	gssEncRequest = 80877104
)

// postgresCodec follows a connection of the protocol https://www.postgresql.org/docs/current/protocol.html.
type postgresCodec struct {
	started    bool              // the StartupMessage was sent: messages have types
	waiting    bool              // the client waits in a round trip that was counted
	unanswered int               // messages that ReadyForQuery answers, each on its own
	statements map[string]string // texts by the name of the prepared statement
	portals    map[string]string // texts by the name of the portal
}

func newPostgresCodec() *postgresCodec {
	return &postgresCodec{statements: make(map[string]string), portals: make(map[string]string)}
}

func (c *postgresCodec) next(from Direction, buf []byte) int {
	header := 1
	if from == FromClient && !c.started {
		header = 0
	}
	if len(buf) < header+4 {
		return 0
	}
	length := binary.BigEndian.Uint32(buf[header:])
	if length < 4 || length > 1<<30 {
		return -1
	}
	if total := header + int(length); len(buf) >= total {
		return total
	}
	return 0
}

func (c *postgresCodec) see(from Direction, message []byte) sight {
	switch {
	case from == FromServer:
		return c.seeServer(message[0], message[5:])
	case c.started:
		return c.seeClient(message[0], message[5:])
	default:
		return c.seeStartup(message[4:])
	}
}

func (c *postgresCodec) seeStartup(body []byte) sight {
	if len(body) < 4 {
		return sight{name: "StartupMessage"}
	}
	switch binary.BigEndian.Uint32(body) {
	case sslRequest:
		return sight{name: "SSLRequest", roundTrip: true, answer: []byte{'N'}}
	case gssEncRequest:
		return sight{name: "GSSENCRequest", roundTrip: true, answer: []byte{'N'}}
	case cancelRequest:
		return sight{name: "CancelRequest"} // answered with a close
	}
	c.started = true
	return sight{name: "StartupMessage", roundTrip: c.wait(1)}
}

// wait notes that the client sent what the server answers, with so many ReadyForQuery. It tells whether that begins a
// round trip.
func (c *postgresCodec) wait(unanswered int) bool {
	begins := !c.waiting
	c.waiting = true
	c.unanswered += unanswered
	return begins
}

func (c *postgresCodec) seeClient(kind byte, body []byte) sight {
	switch kind {
	case 'Q':
		text, _ := cutString(body)
		return sight{name: "Query", text: text, roundTrip: c.wait(1)}
	case 'P':
		name, rest := cutString(body)
		text, _ := cutString(rest)
		c.statements[name] = text
		return sight{name: "Parse", text: text}
	case 'B':
		portal, rest := cutString(body)
		statement, _ := cutString(rest)
		c.portals[portal] = c.statements[statement]
		return sight{name: "Bind", text: c.portals[portal]}
	case 'E':
		portal, _ := cutString(body)
		return sight{name: "Execute", text: c.portals[portal]}
	case 'D', 'C':
		return c.seeNamed(kind, body)
	case 'S':
		return sight{name: "Sync", roundTrip: c.wait(1)}
	case 'H':
		return sight{name: "Flush", roundTrip: c.wait(0)}
	case 'F':
		return sight{name: "FunctionCall", roundTrip: c.wait(1)}
	case 'p':
		return sight{name: "PasswordMessage", roundTrip: c.wait(0)}
	case 'd':
		return sight{name: "CopyData"}
	case 'c':
		return sight{name: "CopyDone", roundTrip: c.wait(0)}
	case 'f':
		return sight{name: "CopyFail", roundTrip: c.wait(0)}
	case 'X':
		return sight{name: "Terminate"}
	default:
		return sight{name: "client message " + string(rune(kind))}
	}
}

// seeNamed sees a Describe or a Close, of a statement or of a portal.
func (c *postgresCodec) seeNamed(kind byte, body []byte) sight {
	seen := sight{name: "Describe"}
	if kind == 'C' {
		seen.name = "Close"
	}
	if len(body) == 0 {
		return seen
	}
	texts := c.portals
	if body[0] == 'S' {
		texts = c.statements
	}
	name, _ := cutString(body[1:])
	seen.text = texts[name]
	return seen
}

var postgresServerMessages = map[byte]string{
	'1': "ParseComplete", '2': "BindComplete", '3': "CloseComplete", 'A': "NotificationResponse", 'C': "CommandComplete",
	'D': "DataRow", 'E': "ErrorResponse", 'G': "CopyInResponse", 'H': "CopyOutResponse", 'I': "EmptyQueryResponse",
	'K': "BackendKeyData", 'N': "NoticeResponse", 'R': "Authentication", 'S': "ParameterStatus", 'T': "RowDescription",
	'V': "FunctionCallResponse", 'W': "CopyBothResponse", 'Z': "ReadyForQuery", 'c': "CopyDone", 'd': "CopyData",
	'n': "NoData", 's': "PortalSuspended", 't': "ParameterDescription", 'v': "NegotiateProtocolVersion",
}

func (c *postgresCodec) seeServer(kind byte, body []byte) sight {
	seen := sight{name: postgresServerMessages[kind]}
	if seen.name == "" {
		seen.name = "server message " + string(rune(kind))
	}
	switch kind {
	case 'Z':
		c.unanswered = max(c.unanswered-1, 0)
		seen.text = string(body)
	case 'C':
		seen.text, _ = cutString(body)
	case 'S':
		seen.text, _ = cutString(body)
	case 'E', 'N':
		seen.text = postgresError(body)
	}
	switch kind {
	case 'A', 'N', 'S': // may come at any time, and answer nothing
	case 'R', 'G', 'W': // it is the client's turn; the ReadyForQuery comes later
		c.waiting = kind == 'R' && !asksClient(body)
	default:
		c.waiting = c.unanswered > 0
	}
	return seen
}

// asksClient tells whether the Authentication message is one that the client answers: neither Ok nor SASLFinal.
func asksClient(body []byte) bool {
	if len(body) < 4 {
		return false
	}
	code := binary.BigEndian.Uint32(body)
	return code != 0 && code != 12
}

// postgresError returns code and message of an ErrorResponse or NoticeResponse.
func postgresError(body []byte) string {
	var code, text string
	for len(body) > 1 {
		field := body[0]
		var value string
		value, body = cutString(body[1:])
		switch field {
		case 'C':
			code = value
		case 'M':
			text = value
		}
	}
	return strings.TrimSpace(code + " " + text)
}

// cutString splits off a string that ends with a NUL.
func cutString(b []byte) (string, []byte) {
	text, rest, _ := bytes.Cut(b, []byte{0})
	return string(text), rest
}
