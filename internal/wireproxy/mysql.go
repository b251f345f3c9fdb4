package wireproxy

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

const (
	maxPacket = 1<<24 - 1 // a packet of this length goes on in the next one

	clientCompress = 0x20
	clientSSL      = 0x800
)

var mysqlCommands = map[byte]string{
	0x01: "COM_QUIT", 0x02: "COM_INIT_DB", 0x03: "COM_QUERY", 0x04: "COM_FIELD_LIST", 0x09: "COM_STATISTICS",
	0x0e: "COM_PING", 0x11: "COM_CHANGE_USER", 0x16: "COM_STMT_PREPARE", 0x17: "COM_STMT_EXECUTE",
	0x18: "COM_STMT_SEND_LONG_DATA", 0x19: "COM_STMT_CLOSE", 0x1a: "COM_STMT_RESET", 0x1b: "COM_SET_OPTION",
	0x1c: "COM_STMT_FETCH", 0x1f: "COM_RESET_CONNECTION",
}

// mysqlCodec follows a connection of the protocol https://dev.mysql.com/doc/dev/mysql-server/latest/PAGE_PROTOCOL.html.
type mysqlCodec struct {
	greeted    bool
	loggedIn   bool              // a command was sent
	preparing  string            // text of the COM_STMT_PREPARE that the next packet answers
	statements map[uint32]string // texts by the statement's number
}

func newMySQLCodec() *mysqlCodec { return &mysqlCodec{statements: make(map[uint32]string)} }

func (c *mysqlCodec) next(_ Direction, buf []byte) int {
	for total := 0; len(buf)-total >= 4; {
		length := int(buf[total]) | int(buf[total+1])<<8 | int(buf[total+2])<<16
		total += 4 + length
		if len(buf) < total {
			return 0
		}
		if length < maxPacket {
			return total
		}
	}
	return 0
}

func (c *mysqlCodec) see(from Direction, message []byte) sight {
	sequence, body := message[3], message[4:]
	switch {
	case from == FromServer:
		return c.seeServer(body)
	case sequence != 0 || len(body) == 0:
		// The login, or the content of a file for LOAD DATA LOCAL, of which only the empty packet at the end is answered.
		return sight{name: "client packet", roundTrip: !c.loggedIn || len(body) == 0}
	default:
		return c.seeCommand(body)
	}
}

func (c *mysqlCodec) seeCommand(body []byte) sight {
	seen := sight{name: mysqlCommands[body[0]], roundTrip: true}
	if seen.name == "" {
		seen.name = fmt.Sprintf("command %#02x", body[0])
	}
	c.loggedIn, c.preparing = seen.name != "COM_CHANGE_USER", ""
	switch seen.name {
	case "COM_QUIT":
		seen.roundTrip = false
	case "COM_QUERY":
		seen.text = string(body[1:])
	case "COM_STMT_PREPARE":
		seen.text = string(body[1:])
		c.preparing = seen.text
	case "COM_STMT_EXECUTE", "COM_STMT_RESET", "COM_STMT_FETCH":
		seen.text = c.statement(body)
	case "COM_STMT_SEND_LONG_DATA":
		seen.roundTrip = false
		seen.text = c.statement(body)
	case "COM_STMT_CLOSE":
		seen.roundTrip = false
		seen.text = c.statement(body)
		if len(body) >= 5 {
			delete(c.statements, binary.LittleEndian.Uint32(body[1:]))
		}
	}
	return seen
}

func (c *mysqlCodec) statement(body []byte) string {
	if len(body) < 5 {
		return ""
	}
	return c.statements[binary.LittleEndian.Uint32(body[1:])]
}

func (c *mysqlCodec) seeServer(body []byte) sight {
	if len(body) == 0 {
		return sight{name: "server packet"}
	}
	greeting := !c.greeted
	c.greeted = true
	switch {
	case body[0] == 0xff && len(body) >= 3:
		c.preparing = ""
		code := binary.LittleEndian.Uint16(body[1:])
		return sight{name: "ERR", text: fmt.Sprintf("%d %s", code, body[3:])}
	case greeting:
		stripCapabilities(body)
		return sight{name: "greeting"}
	case c.preparing != "" && body[0] == 0x00 && len(body) >= 5:
		text := c.preparing
		c.preparing = ""
		c.statements[binary.LittleEndian.Uint32(body[1:])] = text
		return sight{name: "prepared", text: text}
	case body[0] == 0x00:
		return sight{name: "OK"} // or a row of a prepared statement
	case body[0] == 0xfe && len(body) < 9:
		return sight{name: "EOF"}
	default:
		return sight{name: "server packet"}
	}
}

// stripCapabilities takes what would hide the packets out of the server's greeting: version, its number, a NUL, four bytes
// of connection number, eight of authentication data, a NUL, and the lower half of the capabilities.
func stripCapabilities(greeting []byte) {
	end := bytes.IndexByte(greeting[1:], 0)
	if end < 0 {
		return
	}
	at := 1 + end + 1 + 4 + 8 + 1
	if len(greeting) < at+2 {
		return
	}
	capabilities := binary.LittleEndian.Uint16(greeting[at:])
	binary.LittleEndian.PutUint16(greeting[at:], capabilities&^(clientCompress|clientSSL))
}
