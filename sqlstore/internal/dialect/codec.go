package dialect

import (
	"encoding/binary"
	"errors"
	"maps"
	"slices"

	"github.com/ThreeDotsLabs/watermill/message"
)

// codecVersion begins everything that is encoded here.
//
// Version 1: a count of messages; of each its UUID, metadata and payload. Metadata: a count; of each field, sorted by
// name, its name and value. Payload: 0 if it is nil, else its length plus 1 and its bytes. All counts and lengths are
// unsigned varints of the shortest form, so that equal messages have equal encodings; all strings are a length and bytes.
const codecVersion = 1

// ErrCorrupt means that bytes are not what was encoded.
var ErrCorrupt = errors.New("stored messages are corrupt, or were written by a newer version")

// EncodeMessages returns the messages' stored form: UUIDs, metadata and payloads byte for byte, in order.
func EncodeMessages(msgs []*message.Message) []byte {
	size := 1 + binary.MaxVarintLen64
	for _, msg := range msgs {
		size += len(msg.UUID) + len(msg.Payload) + 3*binary.MaxVarintLen64 + metadataSize(msg.Metadata)
	}
	b := make([]byte, 1, size)
	b[0] = codecVersion
	b = binary.AppendUvarint(b, uint64(len(msgs)))
	for _, msg := range msgs {
		b = appendString(b, msg.UUID)
		b = appendMetadata(b, msg.Metadata)
		if msg.Payload == nil {
			b = append(b, 0)
			continue
		}
		b = binary.AppendUvarint(b, uint64(len(msg.Payload))+1)
		b = append(b, msg.Payload...)
	}
	return b
}

// DecodeMessages returns the messages that EncodeMessages encoded, with metadata that is never nil. Their payloads share
// b's memory. Bytes of any other origin are ErrCorrupt.
func DecodeMessages(b []byte) ([]*message.Message, error) {
	d := decoder{b: b}
	d.version()
	count := d.count(3)
	msgs := make([]*message.Message, 0, count)
	for range count {
		uuid := string(d.bytes(d.uvarint()))
		metadata := d.metadata()
		var payload message.Payload
		if n := d.uvarint(); n > 0 {
			payload = d.bytes(n - 1)
		}
		if d.failed {
			break
		}
		msg := message.NewMessage(uuid, payload)
		msg.Metadata = metadata
		msgs = append(msgs, msg)
	}
	if d.failed || len(d.b) > 0 {
		return nil, ErrCorrupt
	}
	return msgs, nil
}

// EncodeMetadata returns the metadata's stored form.
func EncodeMetadata(metadata message.Metadata) []byte {
	b := make([]byte, 1, 1+metadataSize(metadata))
	b[0] = codecVersion
	return appendMetadata(b, metadata)
}

// DecodeMetadata returns the metadata that EncodeMetadata encoded, never nil. Bytes of any other origin are ErrCorrupt.
func DecodeMetadata(b []byte) (message.Metadata, error) {
	d := decoder{b: b}
	d.version()
	metadata := d.metadata()
	if d.failed || len(d.b) > 0 {
		return nil, ErrCorrupt
	}
	return metadata, nil
}

func metadataSize(metadata message.Metadata) int {
	size := binary.MaxVarintLen64
	for name, value := range metadata {
		size += len(name) + len(value) + 2*binary.MaxVarintLen64
	}
	return size
}

func appendMetadata(b []byte, metadata message.Metadata) []byte {
	b = binary.AppendUvarint(b, uint64(len(metadata)))
	for _, name := range slices.Sorted(maps.Keys(metadata)) {
		b = appendString(b, name)
		b = appendString(b, metadata[name])
	}
	return b
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// decoder takes values off b. After the first that is not there it has failed and returns zero values.
type decoder struct {
	b      []byte
	failed bool
}

func (d *decoder) fail() {
	d.failed = true
	d.b = nil
}

func (d *decoder) version() {
	if len(d.b) == 0 || d.b[0] != codecVersion {
		d.fail()
		return
	}
	d.b = d.b[1:]
}

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 || (n > 1 && d.b[n-1] == 0) { // missing, too large, or longer than it needs to be
		d.fail()
		return 0
	}
	d.b = d.b[n:]
	return v
}

// count returns how many items of at least so many bytes follow: no more than there is room for.
func (d *decoder) count(itemSize int) int {
	n := d.uvarint()
	if n > uint64(len(d.b)/itemSize) {
		d.fail()
		return 0
	}
	return int(n)
}

func (d *decoder) bytes(n uint64) []byte {
	if n > uint64(len(d.b)) {
		d.fail()
		return nil
	}
	v := d.b[:n:n]
	d.b = d.b[n:]
	return v
}

func (d *decoder) metadata() message.Metadata {
	count := d.count(2)
	metadata := make(message.Metadata, min(count, 64))
	last := ""
	for i := range count {
		name := string(d.bytes(d.uvarint()))
		value := string(d.bytes(d.uvarint()))
		if d.failed || (i > 0 && name <= last) { // names are sorted and occur once
			d.fail()
			return nil
		}
		metadata[name] = value
		last = name
	}
	return metadata
}
