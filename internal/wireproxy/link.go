package wireproxy

import (
	"bytes"
	"net"
	"sync"
)

// codec knows one connection's protocol. The link serializes its calls.
type codec interface {
	// next returns the length of the first message in buf, 0 while it is incomplete, -1 if it cannot be one.
	next(from Direction, buf []byte) int

	// see describes a message, which it may change in place.
	see(from Direction, message []byte) sight
}

// sight is what a codec saw in a message.
type sight struct {
	name, text string
	roundTrip  bool   // begins one
	answer     []byte // what the proxy itself answers; the message is not passed on
}

// link is a connection of a client, and the one to the server that it is passed on to.
type link struct {
	proxy          *Proxy
	id             int
	client, server net.Conn
	closed         chan struct{}
	closing        sync.Once
	cut            chan struct{} // closed: nothing is passed on any more
	cutting        sync.Once

	mu    sync.Mutex
	codec codec
	hold  *Trap // of the stall in progress
}

func newLink(p *Proxy, client, server net.Conn) *link {
	l := &link{proxy: p, client: client, server: server, closed: make(chan struct{}), cut: make(chan struct{})}
	if p.protocol == MySQL {
		l.codec = newMySQLCodec()
	} else {
		l.codec = newPostgresCodec()
	}
	return l
}

// run passes messages on until the server closed its side. When the client's side ends first, the server is told so and
// read to its end: then everything that it was sent has been processed.
func (l *link) run() {
	var running sync.WaitGroup
	fromClient := &stream{link: l, from: FromClient, to: l.server, chunks: make(chan []byte)}
	fromServer := &stream{link: l, from: FromServer, to: l.client, chunks: make(chan []byte)}
	running.Go(func() { l.read(l.client, fromClient.chunks) })
	running.Go(func() { l.read(l.server, fromServer.chunks) })
	running.Go(func() {
		fromClient.pump()
		l.stop()
		l.endServer()
	})
	fromServer.pump()
	l.close()
	running.Wait()
}

func (l *link) close() {
	l.closing.Do(func() {
		close(l.closed)
		_ = l.client.Close()
		_ = l.server.Close()
	})
}

// stop makes both streams pass nothing on any more.
func (l *link) stop() {
	l.cutting.Do(func() { close(l.cut) })
}

func (l *link) stopped() bool {
	select {
	case <-l.cut:
		return true
	default:
		return false
	}
}

// endServer tells the server that the client sends nothing more.
func (l *link) endServer() {
	if half, ok := l.server.(interface{ CloseWrite() error }); ok { // TCP and Unix sockets
		_ = half.CloseWrite()
	}
}

// read is apart from the streams, so that one that holds a message still notices when the client closes.
func (l *link) read(conn net.Conn, chunks chan<- []byte) {
	defer close(chunks)
	buf := make([]byte, 64<<10)
	for {
		n, err := conn.Read(buf)
		if n > 0 {
			select {
			case chunks <- bytes.Clone(buf[:n]):
			case <-l.closed:
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// setHold replaces one stall, or none, by another.
func (l *link) setHold(former, next *Trap) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.hold == former {
		l.hold = next
	}
}

func (l *link) held() *Trap {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.hold
}

// see lets codec and proxy look at a message.
func (l *link) see(from Direction, message []byte) (sight, *Trap) {
	l.mu.Lock()
	defer l.mu.Unlock()
	seen := l.codec.see(from, message)
	trap := l.proxy.see(Message{Conn: l.id, From: from, Name: seen.name, Text: seen.text}, seen.roundTrip, seen.answer == nil)
	return seen, trap
}

func (l *link) length(from Direction, buf []byte) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.codec.next(from, buf)
}

// stream passes messages on in one direction.
type stream struct {
	link   *link
	from   Direction
	to     net.Conn
	chunks chan []byte
	in     []byte // read, not looked at
	out    []byte // to be passed on
}

// pump passes on as many messages at a time as one read brought: what a client pipelines in one write is seen whole before
// the server can answer any of it.
func (s *stream) pump() {
	for chunk := range s.chunks {
		s.in = append(s.in, chunk...)
		if !s.process() || !s.flush() {
			return
		}
	}
}

// process looks at the messages that were read whole. False ends the stream.
func (s *stream) process() bool {
	for !s.link.stopped() {
		n := s.link.length(s.from, s.in)
		if n == 0 {
			return true
		}
		if n < 0 {
			s.link.proxy.see(Message{Conn: s.link.id, From: s.from, Name: "malformed message"}, false, false)
			return false
		}
		message := s.in[:n]
		s.in = s.in[n:]
		seen, trap := s.link.see(s.from, message)
		switch {
		case seen.answer != nil:
			_, _ = s.link.client.Write(seen.answer)
		case trap == nil:
			s.out = append(s.out, message...)
		case !s.fault(trap.fault.Kind, trap, message):
			return false
		}
	}
	s.in = nil
	return s.from == FromServer // which is read to its end
}

// fault does what the trap is set for. Messages before it are passed on. False ends the stream.
func (s *stream) fault(kind Kind, trap *Trap, message []byte) bool {
	switch kind {
	case Drop:
		return true
	case Stall:
		if !s.flush() {
			return false
		}
		s.link.setHold(nil, trap)
		s.out = append(s.out, message...)
		return s.flush()
	case CutAfter:
		s.out = append(s.out, message...)
	case CutBefore:
	}
	if s.from == FromClient {
		s.link.stop() // no reply gets through
		_, _ = s.to.Write(s.out)
		return false
	}
	_, _ = s.to.Write(s.out)
	s.out = nil
	s.link.stop()
	s.link.endServer()
	return true
}

// flush passes on what is due, after a stall if there is one. False ends the stream.
func (s *stream) flush() bool {
	if trap := s.link.held(); trap != nil && !s.awaitRelease(trap) {
		return false
	}
	if s.link.stopped() {
		s.out = nil
		return s.from == FromServer
	}
	if len(s.out) == 0 {
		return true
	}
	_, err := s.to.Write(s.out)
	s.out = s.out[:0]
	return err == nil || s.from == FromServer // without a client, the server is read to its end
}

// awaitRelease waits until the stall is released, or is over because the client closed. False ends the stream.
func (s *stream) awaitRelease(trap *Trap) bool {
	chunks := s.chunks
	if s.from == FromServer {
		chunks = nil // the client shall not notice even that the server closed
	}
	for {
		select {
		case chunk, ok := <-chunks:
			if !ok {
				return false
			}
			s.in = append(s.in, chunk...)
		case <-trap.released:
			s.link.setHold(trap, nil)
			return true
		case <-s.link.cut:
			return true
		case <-s.link.closed:
			return false
		}
	}
}
