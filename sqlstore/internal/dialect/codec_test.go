package dialect_test

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

func newMessage(uuid string, payload []byte, metadata message.Metadata) *message.Message {
	msg := message.NewMessage(uuid, payload)
	msg.Metadata = metadata
	return msg
}

func oddMessages() []*message.Message {
	return []*message.Message{
		newMessage("b-first", []byte("payload"), message.Metadata{"b": "2", "a": "1", "": "empty name", "c": ""}),
		newMessage("", nil, nil),
		newMessage("a-second\x00\xff", []byte{}, message.Metadata{"\xff\x00": "\xfe\u0000"}),
		newMessage("big", bytes.Repeat([]byte{0, 0xff, '\n'}, 1<<16), message.Metadata{}),
		{},
	}
}

func sameMessages(t *testing.T, got, want []*message.Message) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("got %d messages, want %d", len(got), len(want))
	}
	for i := range want {
		if got[i].UUID != want[i].UUID {
			t.Errorf("message %d: UUID %q, want %q", i, got[i].UUID, want[i].UUID)
		}
		if !bytes.Equal(got[i].Payload, want[i].Payload) || (got[i].Payload == nil) != (want[i].Payload == nil) {
			t.Errorf("message %d: payload differs", i)
		}
		if got[i].Metadata == nil {
			t.Errorf("message %d: nil metadata", i)
		}
		if len(got[i].Metadata) != len(want[i].Metadata) {
			t.Errorf("message %d: metadata %q, want %q", i, got[i].Metadata, want[i].Metadata)
		}
		for name, value := range want[i].Metadata {
			if v, ok := got[i].Metadata[name]; !ok || v != value {
				t.Errorf("message %d: metadata %q: %q, want %q", i, name, v, value)
			}
		}
	}
}

func TestMessagesSurviveEncoding(t *testing.T) {
	t.Parallel()

	for _, want := range [][]*message.Message{{}, oddMessages()[:1], oddMessages()} {
		got, err := dialect.DecodeMessages(dialect.EncodeMessages(want))
		if err != nil {
			t.Fatal(err)
		}
		sameMessages(t, got, want)
	}
}

func TestMetadataSurvivesEncoding(t *testing.T) {
	t.Parallel()

	for _, want := range []message.Metadata{nil, {}, {"b": "2", "a": "1", "": "\xff", "\x00": ""}} {
		got, err := dialect.DecodeMetadata(dialect.EncodeMetadata(want))
		if err != nil {
			t.Fatal(err)
		}
		sameMessages(t, []*message.Message{newMessage("", nil, got)}, []*message.Message{newMessage("", nil, want)})
	}
}

func TestEqualMessagesHaveEqualEncodings(t *testing.T) {
	t.Parallel()

	want := dialect.EncodeMessages(oddMessages())
	for range 50 {
		if !bytes.Equal(dialect.EncodeMessages(oddMessages()), want) {
			t.Fatal("encodings of equal messages differ")
		}
	}
}

func TestDecodedPayloadsDoNotGrowIntoEachOther(t *testing.T) {
	t.Parallel()

	msgs, err := dialect.DecodeMessages(dialect.EncodeMessages([]*message.Message{
		newMessage("1", []byte("one"), nil), newMessage("2", []byte("two"), nil),
	}))
	if err != nil {
		t.Fatal(err)
	}
	_ = append(msgs[0].Payload, bytes.Repeat([]byte("x"), 100)...)
	if got := string(msgs[1].Payload); got != "two" {
		t.Errorf("appending to one payload changed the next to %q", got)
	}
}

// corruptions are no encodings, each for a reason of its own.
var corruptions = map[string][]byte{
	"Empty":               {},
	"Version":             {2, 0},
	"NoCount":             {1},
	"TooFewMessages":      {1, 2, 0, 0, 0},
	"HugeCount":           binary.AppendUvarint([]byte{1}, 1<<63),
	"HugeLength":          append(binary.AppendUvarint([]byte{1, 1}, 1<<63), 0, 0, 0),
	"HugePayload":         binary.AppendUvarint([]byte{1, 1, 0, 0}, 1<<64-1),
	"HugeMetadata":        append(binary.AppendUvarint([]byte{1, 1, 0}, 1<<40), 0, 0, 0),
	"OverflowingVarint":   append([]byte{1}, bytes.Repeat([]byte{0xff}, 11)...),
	"LongVarint":          {1, 0x81, 0x00, 0, 0, 0},
	"TrailingBytes":       {1, 0, 0},
	"MetadataNotSorted":   {1, 1, 0, 2, 1, 'b', 0, 1, 'a', 0, 0},
	"MetadataNameTwice":   {1, 1, 0, 2, 1, 'a', 0, 1, 'a', 0, 0},
	"EmptyNameTwice":      {1, 1, 0, 2, 0, 0, 0, 0, 0},
	"CutInsideOfMetadata": {1, 1, 0, 1, 1, 'a'},
}

func TestDecodingIsStrict(t *testing.T) {
	t.Parallel()

	for name, b := range corruptions {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			if msgs, err := dialect.DecodeMessages(b); err == nil {
				t.Errorf("decoded %x to %d messages", b, len(msgs))
			}
		})
	}
}

func TestDecodingRefusesEveryPrefix(t *testing.T) {
	t.Parallel()

	whole := dialect.EncodeMessages(oddMessages()[:3])
	for n := range whole {
		if _, err := dialect.DecodeMessages(whole[:n]); err == nil {
			t.Errorf("decoded the first %d of %d bytes", n, len(whole))
		}
	}
	metadata := dialect.EncodeMetadata(oddMessages()[0].Metadata)
	for n := range metadata {
		if _, err := dialect.DecodeMetadata(metadata[:n]); err == nil {
			t.Errorf("decoded the first %d of %d bytes of metadata", n, len(metadata))
		}
	}
}

// FuzzDecodeMessages checks that what can be decoded has exactly that encoding, and that nothing panics.
func FuzzDecodeMessages(f *testing.F) {
	f.Add(dialect.EncodeMessages(nil))
	f.Add(dialect.EncodeMessages(oddMessages()[:3]))
	f.Add(dialect.EncodeMetadata(oddMessages()[0].Metadata))
	for _, b := range corruptions {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if msgs, err := dialect.DecodeMessages(b); err == nil && !bytes.Equal(dialect.EncodeMessages(msgs), b) {
			t.Errorf("%x is decoded, but is not what its messages are encoded to", b)
		}
		if metadata, err := dialect.DecodeMetadata(b); err == nil && !bytes.Equal(dialect.EncodeMetadata(metadata), b) {
			t.Errorf("%x is decoded, but is not what its metadata is encoded to", b)
		}
	})
}
