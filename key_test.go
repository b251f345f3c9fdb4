package inbox_test

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/watermill-inbox/inbox"
)

func TestNormalizeKeepsOrdinaryKeysAndHashesTheRest(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", inbox.MaxKeyLength)
	for _, tt := range []struct {
		id   string
		kept bool
	}{
		{"7d9c1b3e-0d3f-4a6e-9d53-6f1f1f0d9a11", true},
		{"ABC", true},
		{"abc ", true},
		{" ", true},
		{"e\u0301", true},
		{"'; DROP TABLE inbox; --", true},
		{long, true},
		{long + "x", false},
		{"a\x00b", false},
		{"\xff", false},
		{"sha256:", false},
		{"sha256:" + strings.Repeat("0", 64), false},
	} {
		key, err := inbox.Key{Consumer: tt.id, MessageID: tt.id}.Normalize()
		if err != nil {
			t.Errorf("%q: %v", tt.id, err)
		}
		if got := key.MessageID == tt.id; got != tt.kept || key.Consumer != key.MessageID {
			t.Errorf("%q is stored as %+v", tt.id, key)
		}
	}
	for _, key := range []inbox.Key{{}, {Consumer: "a"}, {MessageID: "b"}} {
		if _, err := key.Normalize(); !errors.Is(err, inbox.ErrInvalidKey) {
			t.Errorf("%+v: %v", key, err)
		}
	}
}

func FuzzNormalize(f *testing.F) {
	f.Add("orders", "id", "orders", "ID")
	f.Add("ab", "c", "a", "bc")
	f.Add("a", "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", "a", "abc")
	f.Add("\xff", "\x00", strings.Repeat("a", 300), "é")
	f.Fuzz(func(t *testing.T, consumerA, idA, consumerB, idB string) {
		a := inbox.Key{Consumer: consumerA, MessageID: idA}
		b := inbox.Key{Consumer: consumerB, MessageID: idB}
		storedA, errA := a.Normalize()
		storedB, errB := b.Normalize()
		if (errA != nil) != (consumerA == "" || idA == "") || (errB != nil) != (consumerB == "" || idB == "") {
			t.Fatalf("%+v: %v; %+v: %v", a, errA, b, errB)
		}
		if errA == nil && errB == nil && (a == b) != (storedA == storedB) {
			t.Errorf("%+v and %+v are stored as %+v and %+v", a, b, storedA, storedB)
		}
		for _, part := range []string{storedA.Consumer, storedA.MessageID} {
			if len(part) > inbox.MaxKeyLength || !utf8.ValidString(part) || strings.Contains(part, "\x00") {
				t.Errorf("%q cannot be stored", part)
			}
		}
	})
}
