package inbox

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
)

// MaxKeyLength is the length in bytes up to which consumers and message IDs are stored as they are.
const MaxKeyLength = 255

// hashedPrefix begins the stored form of what cannot be stored as it is. What already begins with it is hashed as well,
// so that nobody can name another key's hash.
const hashedPrefix = "sha256:"

// Key identifies a message to the inbox: a message is processed once per consumer. Keys are compared byte by byte.
type Key struct {
	// Consumer is who processes the message. Two consumers of one message both process it.
	Consumer string

	// MessageID is the message's identity, the same for all of its deliveries.
	MessageID string
}

// Normalize returns the key's stored form, the same for every store: parts of at most [MaxKeyLength] bytes of UTF-8
// without NUL stay as they are, all others (and those with the reserved prefix "sha256:") become "sha256:<hex>".
// Different keys have different stored forms. An empty part is [ErrInvalidKey].
//
// Normalize is for the callers of a store; the keys that a store is handed in a [Claim] went through it.
func (k Key) Normalize() (Key, error) {
	if k.Consumer == "" {
		return Key{}, fmt.Errorf("%w: the consumer is empty", ErrInvalidKey)
	}
	if k.MessageID == "" {
		return Key{}, fmt.Errorf("%w: the message ID is empty", ErrInvalidKey)
	}
	return Key{Consumer: storedForm(k.Consumer), MessageID: storedForm(k.MessageID)}, nil
}

func storedForm(part string) string {
	if len(part) <= MaxKeyLength && utf8.ValidString(part) &&
		strings.IndexByte(part, 0) < 0 && !strings.HasPrefix(part, hashedPrefix) {
		return part
	}
	sum := sha256.Sum256([]byte(part))
	return hashedPrefix + hex.EncodeToString(sum[:])
}

// MessageIDFromMetadata returns a [Config].MessageID function that takes the ID from the metadata field of that name.
// A message without the field, or with an empty one, is [ErrInvalidKey].
func MessageIDFromMetadata(name string) func(*message.Message) (string, error) {
	return func(msg *message.Message) (string, error) {
		id := msg.Metadata.Get(name)
		if id == "" {
			return "", fmt.Errorf("%w: no metadata field %q", ErrInvalidKey, name)
		}
		return id, nil
	}
}
